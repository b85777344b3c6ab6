"""Devices as a plan sees them: how fast they move bytes and compute, from data sheets or measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fitact.base import UsageError, quote

TERA, GIGA = 1e12, 1e9
NVIDIA = "https://www.nvidia.com/content/dam/en-zz/Solutions"


@dataclass(frozen=True)
class Device:
    """How fast a device is.

    An operation takes as long as the slower of moving its bytes and computing.

    Attributes:
        name: of the device.
        memory: bytes; None if unknown.
        bandwidth: bytes a second, of the device's memory.
        products: FLOPs a second of matrix products in 16 bits, dense, with sums in float32.
        products32: the same in float32, as PyTorch computes them by default, without TF32.
        rest: FLOPs a second of everything else, in float32.
        launch: seconds that an operation takes at least; 0 where the data sheet does not say.
        source: where the numbers are from.
        link: bytes a second between device and host, one way; None if unknown, or if there is no link.

    """

    name: str
    memory: int | None
    bandwidth: float
    products: float
    products32: float
    rest: float
    launch: float
    source: str
    link: float | None = None

    @property
    def kernels(self) -> str:
        """Whose kernels decide what is saved: `"cpu"` or `"cuda"`."""
        return "cpu" if self.name.startswith("CPU") else "cuda"

    def seconds(self, traffic: int, products: int, products32: int, rest: int) -> float:
        """Return how long an operation takes, by bytes moved and by FLOPs of the three kinds."""
        computing = products / self.products + products32 / self.products32 + rest / self.rest
        return max(self.launch, traffic / self.bandwidth, computing)


# Between device and host, one way, in GB/s: PCI Express by its base specification, with 16 lanes and its encoding
# of 128 bits in 130; NVLink-C2C by the data sheet of GH200.
PCIE3, PCIE4, PCIE5, C2C = 15.75, 31.5, 63.0, 450.0
# Shares of an H200's data sheet: steps of LLaMA-7B took 4 to 9 % longer than by these; copies reached the last.
REACHED, PRODUCTS, LINK = 0.8, 0.75, 0.86


def _gpu(
    name: str, gib: int, link: float, bandwidth: float, products: float, single: float, rest: float, source: str
) -> Device:
    """Return a device by its data sheet, in GB/s and TFLOP/s; kernels reach a part of these rates."""
    rates = (REACHED * bandwidth * GIGA, PRODUCTS * products * TERA, PRODUCTS * single * TERA, rest * TERA)
    return Device(name, gib * 2**30, *rates, 0.0, source, LINK * link * GIGA)


# Dense rates; the data sheets of H100, H200 and B200 print those with sparsity, which are twice as high.
DEVICES: dict[str, Device] = {
    "a100": _gpu("A100 80GB SXM", 80, PCIE4, 2039, 312, 19.5, 19.5,
        f"{NVIDIA}/Data-Center/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf"),
    "h100": _gpu("H100 SXM", 80, PCIE5, 3350, 989.5, 67, 67,
        "NVIDIA H100 Tensor Core GPU data sheet, https://www.nvidia.com/en-us/data-center/h100/"),
    "h200": _gpu("H200 SXM", 141, PCIE5, 4800, 989.5, 67, 67,
        "NVIDIA H200 Tensor Core GPU data sheet, https://www.nvidia.com/en-us/data-center/h200/"),
    "gh200": _gpu("GH200 96GB", 96, C2C, 4000, 989.5, 67, 67,
        "NVIDIA GH200 Grace Hopper Superchip data sheet, "
        "https://www.nvidia.com/en-us/data-center/grace-hopper-superchip/"),
    "b200": _gpu("B200 SXM", 180, PCIE5, 8000, 2250, 75, 75,
        "NVIDIA DGX B200 and HGX B200 data sheets, an eighth of a system, "
        "https://www.nvidia.com/en-us/data-center/hgx/"),
    "mi300x": _gpu("MI300X", 192, PCIE5, 5300, 1307.4, 163.4, 163.4,
        "AMD Instinct MI300X data sheet, https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html"),
    "rtx4090": _gpu("RTX 4090", 24, PCIE4, 1008, 165.2, 82.6, 82.6,
        "NVIDIA Ada GPU architecture whitepaper, appendix A"),
    "rtx3090": _gpu("RTX 3090", 24, PCIE4, 936, 71, 35.6, 35.6,
        "NVIDIA Ampere GA102 GPU architecture whitepaper, table 9"),
    "t4": _gpu("T4", 16, PCIE3, 320, 65, 8.1, 8.1,
        f"{NVIDIA}/Data-Center/tesla-t4/t4-tensor-core-datasheet-951643.pdf"),
}  # fmt: skip
USUAL = "a100"


def device_of(name: str) -> Device:
    """Return a device of the table by its short name; UsageError if it is not there."""
    if name not in DEVICES:
        raise UsageError(f"device {quote(name)}: expected {', '.join(DEVICES)}, or one that is measured")
    return DEVICES[name]


# ------------------------------------------------------------------------------------------------------- measured

SECONDS = 1.5  # for each of the rates
SIZE = 1024  # of the products on a CPU, and four times that on a GPU
CACHED = 2**16  # elements that stay in a CPU's cache
CURVED = 20  # FLOPs that an exponential or an error function counts for


def measured(where: str | None = None) -> Device:
    """Measure a device, in about ten seconds.

    Args:
        where: `"cpu"` or `"cuda"`; by default a GPU if PyTorch finds one.

    Returns:
        The device. A product of matrices gives the rates of products, copying large tensors gives the bandwidth,
        GELU of a small tensor on a CPU (of a large one on a GPU, where it is bound by bandwidth) the rest. Copies
        from a GPU to pinned memory give that of the link; a CPU has none.

    Raises:
        UsageError: PyTorch finds no such device.

    """
    where = where or ("cuda" if torch.cuda.is_available() else "cpu")
    if where not in ("cpu", "cuda") or (where == "cuda" and not torch.cuda.is_available()):
        raise UsageError(f"device {quote(where)}: PyTorch finds no such device to measure")
    gpu = where == "cuda"
    size = SIZE * (4 if gpu else 1)
    with torch.no_grad():
        half, single = (
            torch.randn(size, size, device=where).to(dtype) for dtype in (torch.bfloat16, torch.float32)
        )
        products, products32 = (2 * size**3 / _seconds(torch.mm, matrix, matrix) for matrix in (half, single))
        large = torch.randn(2**28 if gpu else 2**25, device=where)
        bandwidth = 2 * large.nbytes / _seconds(torch.neg, large)
        some = torch.randn(2**26 if gpu else CACHED, device=where)
        rest = CURVED * some.numel() / _seconds(torch.nn.functional.gelu, some)
        launch = _seconds(torch.neg, torch.randn(16, device=where))
        link = None
        if gpu:
            host = torch.empty(2**26, pin_memory=True)
            link = host.nbytes / _seconds(partial(host.copy_, non_blocking=True), some)
    name = torch.cuda.get_device_name() if gpu else f"CPU with {torch.get_num_threads()} threads"
    memory = torch.cuda.get_device_properties(0).total_memory if gpu else None
    return Device(name, memory, bandwidth, products, products32, rest, launch, "measured on this machine", link)


def _seconds(function: Callable[..., Tensor], *args: Tensor) -> float:
    """Return the median time of a call, on all threads."""
    from torch.utils.benchmark import Timer

    names = {"function": function, "args": args}
    timer = Timer("function(*args)", globals=names, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=SECONDS).median
