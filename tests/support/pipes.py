"""Which part of a GPU an instruction occupies, by its name, and how many of each a kernel takes.

NVIDIA's are those of Nsight Compute's guide (Kernel Profiling Guide, "Pipelines"): fma has float32's sums and
products, imad the products of integers, which only a half of H100's fma pipe does, half those of half precision,
alu logic, comparisons, selects, sums of integers and moves, special (XU) the functions and the conversions between
integers and floats, lsu memory, shuffles, barriers and special registers. `uniform` runs once for a warp,
`control` has jumps. convert is float32 to half precision, which has a rate of its own; fma2 has sm_100's pairs of
products.

AMD's: vector (VALU), `quarter` what of it runs at a quarter of the rate, scalar (SALU and scalar memory), memory
(VMEM and LDS), control.
"""

from __future__ import annotations

from collections import Counter

from tests.support.instructions import Program, Way, ways

NVIDIA = {
    "fma": "FADD FFMA FMUL",
    "fma2": "FADD2 FFMA2 FMUL2",
    "half": "FHADD FHFMA HADD2 HFMA2 HMUL2 HSETP2 HMNMX2",
    "imad": "IMAD IMUL",
    "alu": "BMSK CS2R FCHK FMNMX FMNMX3 FSEL FSET FSETP I2FP IABS IADD IADD3 IMNMX ISETP LEA LOP3 MOV P2R PLOP3 "
    "PRMT R2P SEL SGXT SHF VIADD VIADDMNMX VIMNMX VOTE",
    "convert": "F2FP",
    "special": "BREV F2F F2I FLO FRND I2F MUFU POPC",
    "lsu": "BAR LDC LDG LDS LDSM S2R SHFL STG STS STSM",
    "uniform": "LDCU R2UR S2UR UFSETP UIADD3 UIMAD UISETP ULDC ULEA ULOP3 UMOV UP2UR UPLOP3 UPRMT USEL USHF VOTEU",
    "control": "BRA BREAK BSSY BSYNC CALL EXIT RET WARPSYNC",
}
_NVIDIA = {name: pipe for pipe, names in NVIDIA.items() for name in names.split()}
_QUARTER = ("v_exp_", "v_log_", "v_rcp_", "v_rsq_", "v_sqrt_", "v_sin_", "v_cos_", "v_mul_lo_u32", "v_mul_hi_")
_AMD = {
    "quarter": (*_QUARTER, "v_mad_u64", "v_mad_i64"),
    "vector": ("v_",),
    "memory": ("buffer_", "global_", "flat_", "ds_"),
    "control": ("s_branch", "s_cbranch", "s_endpgm", "s_barrier", "s_setpc", "s_swappc"),
    "scalar": ("s_",),
}


def pipe(name: str) -> str:
    """Return the part of the GPU that an instruction occupies.

    Raises:
        ValueError: the instruction is in neither table.

    """
    if name[0].islower():
        found = next((one for one, starts in _AMD.items() if name.startswith(starts)), None)
    else:
        found = _NVIDIA.get(name.split(".")[0])
    if found is None:
        raise ValueError(f"{name}: expected an instruction of the tables in tests/support/pipes.py, add it there")
    return found


def pipes(way: Way, trips: int, elements: int) -> dict[str, float]:
    """Return the instructions an element by pipe, of a way whose loop runs `trips` times."""
    counts: Counter[str] = Counter()
    for part, times in ((way.loop, trips), (way.rest, 1)):
        for one in part:
            if one.counted:
                counts[pipe(one.name)] += times
    return {name: number / elements for name, number in sorted(counts.items())}


def whole(program: Program, stored: int, *, sums: bool = False) -> tuple[Way, int]:
    """Return the way of a full tile through a kernel that masks the last one, and how often it runs its loop.

    Of the ways that store all the bytes without a mask in the loop, the one with the fewest accesses to memory,
    and of these the one with the shortest loop: AMD's masks are no predicates.

    Args:
        program: the kernel's.
        stored: bytes that a thread stores.
        sums: whether it may store a few numbers besides, after the loop, with a predicate.

    Raises:
        ValueError: no way stores them.

    """
    fitting: list[tuple[int, int, int, Way, int]] = []
    for way in ways(program, guarded=sums):
        loop, rest = (sum(one.store for one in part) for part in (way.loop, way.rest))
        if any(one.guarded and (one.load or one.store) for one in way.loop):
            continue
        trips = -((rest - stored) // loop) if loop else 0
        besides = trips * loop + rest - stored
        if bool(way.loop) == bool(trips) and 0 <= besides <= (FEW if sums else 0):
            repeated, once = (sum(bool(one.load or one.store) for one in part) for part in (way.loop, way.rest))
            inside, outside = (sum(one.counted for one in part) for part in (way.loop, way.rest))
            fitting.append((trips * repeated + once, trips * inside, -outside, way, trips))
    if not fitting:
        raise ValueError(f"no way stores {stored} bytes")
    *_, way, trips = min(fitting, key=lambda one: one[:3])
    return way, trips


def masked(program: Program, stored: int) -> tuple[Way, int]:
    """Return the way through a kernel that masks its accesses, and how often it runs its loop, if it has one.

    No jump with a predicate is taken but the one at the end of the loop, and AMD's into a block that some of the
    threads run: the way of a full tile skips nothing.

    Args:
        program: the kernel's.
        stored: bytes that a thread stores, but for a few numbers a row, a channel or a block; they give the trips.

    Raises:
        ValueError: the way does not store them.

    """
    at: int | None = 0
    seen: list[int] = []
    loop: list[int] = []
    while at is not None:
        if at in seen:
            loop = seen[seen.index(at) :]
            at = _left(program, loop)
            continue
        one = program.instructions[at]
        seen.append(at)
        goal = None if one.goal is None else program.labels[one.goal]
        if goal is not None and (not one.guarded or one.name == "s_cbranch_execnz"):
            at = goal
        elif goal in seen:
            loop, at = seen[seen.index(goal) :], at + 1
        else:
            at = None if one.ends and not one.guarded else at + 1
    inside = set(loop)
    rest = [program.instructions[each] for each in seen if each not in inside]
    way = Way([program.instructions[each] for each in loop], rest)
    written = [sum(one.store for one in part) for part in way]
    trips = stored // written[0] if written[0] else 0
    if not stored <= trips * written[0] + written[1] <= stored + FEW or bool(loop) != bool(trips):
        raise ValueError(f"{trips} trips of {written[0]} bytes and {written[1]} others: expected {stored} stored")
    return way, trips


def _left(program: Program, loop: list[int]) -> int | None:
    """Return where a loop is left for, by the last jump out of it; None if the thread ends within."""
    ways = [program.instructions[each] for each in loop if program.instructions[each].guarded]
    goals = [program.labels[one.goal] for one in ways if one.goal is not None and "_exec" not in one.name]
    return next((goal for goal in reversed(goals) if goal not in loop), None)


FEW = 32  # bytes that a thread may store besides: a norm's scale, the sums of learned parameters
