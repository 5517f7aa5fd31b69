"""The check: a few steps of the engine in several stages, held against a plain loop over the same layers."""

from penstock.engine.check.comparison import check as check
from penstock.engine.check.report import CheckReport as CheckReport
