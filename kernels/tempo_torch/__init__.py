"""`tempoize(model)` makes any PyTorch model keep less for backward, in one line. It needs torch only, and knows models
of transformers and adapters of peft where these are installed."""

from tempo_torch.report import Entry, Report
from tempo_torch.tempoize import CHOICES, check, read_step, report_on, restore, samples, set_step, tempoize

__all__ = ["CHOICES", "Entry", "Report"]
__all__ += ["check", "read_step", "report_on", "restore", "samples", "set_step", "tempoize"]
