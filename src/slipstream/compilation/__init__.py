"""Safe compilation; this package is the only place that calls torch.compile."""
