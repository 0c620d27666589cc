"""Block decoding with a drafter, plain decoding beside it, and what they measure: acceptance, losslessness, speed."""
