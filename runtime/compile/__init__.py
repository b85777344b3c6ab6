"""`torch.compile` with block codes in place of what the compiled forward pass saves for backward."""

from .compile import BUDGET as BUDGET
from .compile import compile as compile  # noqa: A004  as torch.compile
from .compile import compile_options as compile_options
from .compile import compile_report as compile_report
from .partition import Partition as Partition
from .report import CompileReport as CompileReport
from .report import SavedRecord as SavedRecord
