"""Norms that save their output, and merging a norm into the linear layers that follow."""

from .merge import merge_norm as merge_norm
from .modules import MSLayerNorm as MSLayerNorm
from .modules import MSRMSNorm as MSRMSNorm
from .modules import ms_layer_norm as ms_layer_norm
from .modules import ms_rms_norm as ms_rms_norm
