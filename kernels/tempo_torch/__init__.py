"""One line for any PyTorch model: `tempoize(model)` lets it keep less for backward. Needs torch only; knows models of
transformers and adapters of peft where these are installed."""

from tempo_torch.report import Entry, Report
from tempo_torch.tempoize import CHOICES, read_step, report_on, restore, samples, set_step, tempoize

__all__ = ["CHOICES", "Entry", "Report", "read_step", "report_on", "restore", "samples", "set_step", "tempoize"]
