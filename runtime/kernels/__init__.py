"""The ops of activations, gates, formulas with learned parameters and norms, and their kinds of kernel.

They import nothing else of fitact: standalone folders have copies of all files here. Generated modules use the
names below, the kinds, their registration and ops, and functions that PyTorch lacks; and those of `tiles`, which
is imported with a generated module or when a kernel first runs.
"""

from . import reference_math as reference_math
from .activations import Inverted as Inverted
from .activations import Output as Output
from .activations import Step as Step
from .activations import apply as apply
from .gates import Gate as Gate
from .gates import apply_gate as apply_gate
from .inputs import active_autocast as active_autocast
from .inputs import autocast_dtype as autocast_dtype
from .inputs import check_dtype as check_dtype
from .inputs import mesh_of as mesh_of
from .inputs import sharded as sharded
from .inputs import without_autocast as without_autocast
from .internals import in_functorch_transform as in_functorch_transform
from .internals import version_of as version_of
from .launch import options as options
from .learned import Learned as Learned
from .learned import LearnedModule as LearnedModule
from .learned import Number as Number
from .learned import apply_learned as apply_learned
from .norms import LAYER as LAYER
from .norms import RMS as RMS
from .ops import KERNEL_DEVICES as KERNEL_DEVICES
from .ops import differentiable as differentiable
from .recompute import ATTRIBUTE as ATTRIBUTE
from .recompute import KernelRecompute as KernelRecompute
from .reference import arithmetic_dtype as arithmetic_dtype
from .registry import Backward as Backward
from .registry import Forward as Forward
from .registry import Kernel as Kernel
from .registry import find as find
from .registry import is_generated as is_generated
from .registry import register as register
from .registry import registered as registered
from .registry import sources as sources
