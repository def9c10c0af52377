from .report import write_paper as write_paper
