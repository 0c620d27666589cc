"""The silent failures of this field, each with a check that stops it before step 0.

Every check runs the code that training and decoding run, on the recipe's own target, tokenizer, data and drafter. The
cheap ones run at every ``train``; ``slipstream preflight`` runs all.
"""

from slipstream.preflight.report import CheckResult, PreflightReport
from slipstream.preflight.runner import CHEAP, CHECKS, cheap_checks, run_checks, run_preflight

__all__ = ["CHEAP", "CHECKS", "CheckResult", "PreflightReport", "cheap_checks", "run_checks", "run_preflight"]
