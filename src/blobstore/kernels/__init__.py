"""Kernels: quantize, dequantize and search for scales, in C++, with bit-equal twins in NumPy."""

from blobstore.kernels.blocks import decode_blocks as decode_blocks
from blobstore.kernels.blocks import decode_blocks_into as decode_blocks_into
from blobstore.kernels.native import KERNELS as KERNELS
from blobstore.kernels.native import Kernel as Kernel
from blobstore.kernels.native import active as active
from blobstore.kernels.native import use as use
from blobstore.kernels.quantize import block_of as block_of
from blobstore.kernels.quantize import dequantize as dequantize
from blobstore.kernels.quantize import dequantize_into as dequantize_into
from blobstore.kernels.quantize import group_range as group_range
from blobstore.kernels.quantize import matrix_of as matrix_of
from blobstore.kernels.quantize import quantization_of as quantization_of
from blobstore.kernels.quantize import quantize as quantize
from blobstore.kernels.quantize import quantize_into as quantize_into
from blobstore.kernels.scales import FP8_BLOCK as FP8_BLOCK
from blobstore.kernels.scales import METHODS as METHODS
from blobstore.kernels.scales import AffineCandidates as AffineCandidates
from blobstore.kernels.scales import BlockRun as BlockRun
from blobstore.kernels.scales import ScaleChoice as ScaleChoice
from blobstore.kernels.scales import check_method as check_method
from blobstore.kernels.scales import checked_importance as checked_importance
from blobstore.kernels.scales import decoded_scales as decoded_scales
from blobstore.kernels.scales import global_scale_of as global_scale_of
from blobstore.kernels.scales import largest_magnitude as largest_magnitude
