"""What a kernel costs, read off its machine code: registers, spills, widths of accesses, instructions an element.

The count is of the instructions that a thread runs in a full tile, whose rows are read and written unmasked. Among
all ways through the code, this is the one whose accesses to memory have no predicate, load and store exactly the
bytes that a thread has to, and are the fewest, hence the widest. A backward jump marks the loop over the rows, and
the bytes that it loads tell how often it runs.

An instruction with a false predicate counts, and so does a rare branch within the loop. A loop within it counts as
one trip; a subroutine, for rare operands of a division or a root, counts as its call. NVIDIA's NOP and AMD's
s_nop, s_waitcnt, s_delay_alu and s_clause do not count.
"""

from __future__ import annotations

import importlib
import re
import struct
import subprocess
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Self

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fitact.runtime.kernels import blocks as block_kernels
from fitact.runtime.kernels.launch import threads_of
from fitact.runtime.kernels.reference import TILE
from fitact.runtime.kernels.registry import find
from fitact.runtime.saving import blocks

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}  # of the table
FLOATS = DTYPES | {"fp16": torch.float16}
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
# Triton 3.5 keeps some scalars of forward kernels for half precision in vector registers; none goes to memory.
SCALARS = () if triton.__version__.startswith("3.5.") else ("sgpr_spill_count",)
SPILLED = ("vgpr_spill_count", *SCALARS, "private_segment_fixed_size")


class Instruction(NamedTuple):
    """An instruction, as far as it is counted and followed.

    Attributes:
        name: with its modifiers.
        guarded: whether it, or what it does to the flow, depends on a predicate.
        goal: the label that it may jump to.
        ends: whether it ends the thread.
        load, store: bytes of global memory.
        counted: whether it does anything but wait.

    """

    name: str
    guarded: bool = False
    goal: str | None = None
    ends: bool = False
    load: int = 0
    store: int = 0
    counted: bool = True


class Program(NamedTuple):
    """The instructions of a kernel in the order of their addresses, and the labels as indices of these."""

    instructions: list[Instruction]
    labels: dict[str, int]

    def next(self, at: int) -> list[int | None]:
        """Return the indices that may follow one; None is the end of the thread."""
        one = self.instructions[at]
        found: list[int | None] = []
        if one.goal is not None:
            found.append(self.labels[one.goal])
        if one.ends:
            found.append(None)
        if not found or one.guarded:
            found.append(at + 1)
        return found


_LABEL = re.compile(r"([.$\w]+):")
_NVIDIA = re.compile(r"\s*/\*[0-9a-f]+\*/\s+(@!?\w+\s+)?([A-Z][\w.]*)([^;]*);")
_NVIDIA_JUMP = re.compile(r"((?:BRA|CALL)[. ][^;]*)\b(0x[0-9a-f]+)(\s*;)")
_NVIDIA_SIZE = 16  # bytes of an instruction
_NVIDIA_BYTES = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}
_AMD = re.compile(r"\s+([a-z]\w*)([^;]*)")
_AMD_ACCESS = re.compile(r"(?:global|buffer|flat)_(load|store)_(\w+)")
_AMD_BYTES = {"dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16}
_AMD_WAITS = ("s_nop", "s_waitcnt", "s_delay_alu", "s_clause")


def nvidia(text: str) -> Program:
    """Return the program that nvdisasm prints."""
    program = Program([], {})
    for line in text.splitlines():
        if label := _LABEL.match(line):
            program.labels[label[1]] = len(program.instructions)
        elif found := _NVIDIA.match(line):
            guard, name, operands = found.groups()
            kind, *modifiers = name.split(".")
            goal = re.search(r"`\((\.L\w+)\)", operands)
            # a far jump is written as a call of a label; subroutines have names
            jumps = kind in ("BRA", "CALL") and goal is not None
            width = next((_NVIDIA_BYTES[m] for m in modifiers if m in _NVIDIA_BYTES), 4)
            program.instructions.append(
                Instruction(
                    name,
                    guarded=guard is not None or (jumps and not operands.lstrip().startswith("`")),
                    goal=goal[1] if goal is not None and jumps else None,
                    ends=kind in ("EXIT", "RET"),
                    load=width if kind == "LDG" else 0,
                    store=width if kind == "STG" else 0,
                    counted=kind != "NOP",
                )
            )
    return program


def amd(text: str) -> Program:
    """Return the program of an assembler text."""
    program = Program([], {})
    for line in text.partition("\n.Lfunc_end")[0].splitlines():
        if label := _LABEL.match(line):
            program.labels[label[1]] = len(program.instructions)
        elif found := _AMD.match(line):
            name, operands = found.groups()
            access = _AMD_ACCESS.match(name)
            width = 0
            if access is not None:
                width = _AMD_BYTES.get(access[2], 1 if "byte" in access[2] else 2)
            jumps = name.startswith(("s_branch", "s_cbranch"))
            program.instructions.append(
                Instruction(
                    name,
                    guarded=name.startswith("s_cbranch"),
                    goal=operands.strip() if jumps else None,
                    ends=name in ("s_endpgm", "s_setpc_b64"),
                    load=width if access is not None and access[1] == "load" else 0,
                    store=width if access is not None and access[1] == "store" else 0,
                    counted=not name.startswith(_AMD_WAITS),
                )
            )
    return program


class Work(NamedTuple):
    """What a thread has to do in a full tile.

    Attributes:
        elements: how many are its share.
        reads, writes: bytes an element of the rows, of codes of a byte each, and of the numbers looked up.
        reads_once, writes_once: bytes of codes in words.

    """

    elements: int
    reads: int
    writes: int
    reads_once: int = 0
    writes_once: int = 0


class Way(NamedTuple):
    """A way through a program: the instructions of its loop, none if it has none, and all others."""

    loop: list[Instruction]
    rest: list[Instruction]

    def trips(self, work: Work) -> int | None:
        """Return how often the loop runs if the accesses are unmasked and just those of `work`, None if not."""
        if any(one.guarded and (one.load or one.store) for one in self.loop + self.rest):
            return None
        loads = work.elements * work.reads + work.reads_once - sum(one.load for one in self.rest)
        stores = work.elements * work.writes + work.writes_once - sum(one.store for one in self.rest)
        if not self.loop:
            return None if loads or stores else 0
        loaded, stored = sum(one.load for one in self.loop), sum(one.store for one in self.loop)
        trips = loads // loaded if loaded else 0
        return trips if trips > 0 and (trips * loaded, trips * stored) == (loads, stores) else None


class _Passed(NamedTuple):
    """What decides whether a way does some work: its loop, bytes loaded and stored elsewhere, and accesses."""

    loop: frozenset[int]
    load: int
    store: int
    accesses: int


def ways(program: Program, *, guarded: bool = False) -> list[Way]:
    """Return the ways from the start of a program to its end that run one loop or none, and guard no access.

    If `guarded`, accesses outside of the loop may have a predicate.
    Of those that have the same loop and as many bytes and accesses, only one with the most instructions: each
    branch may double the number of all.
    """
    loops = _loops(program)
    inside = {at: loop for loop in loops for at in loop}

    def following(at: int) -> list[int | None]:
        loop = inside.get(at)
        if loop is None:
            return program.next(at)
        return list({after for one in loop for after in program.next(one)} - loop)

    # By instruction, and by what has been passed before it: how many count, and the last with those before it.
    reached: dict[int | None, dict[_Passed, tuple[int, Any]]] = {0: {_Passed(frozenset(), 0, 0, 0): (0, None)}}
    for at in _sorted(following):
        one, loop = program.instructions[at], inside.get(at, frozenset())
        access = not loop and bool(one.load or one.store)
        for passed, (counted, before) in reached.pop(at, {}).items():
            if (loop and passed.loop) or (access and one.guarded and not guarded):
                continue
            now = _Passed(loop, *passed[1:]) if loop else passed
            if access:
                now = _Passed(passed.loop, passed.load + one.load, passed.store + one.store, passed.accesses + 1)
            new = (counted, before) if loop else (counted + one.counted, (at, before))
            for after in following(at):
                known = reached.setdefault(after, {})
                if now not in known or known[now][0] < new[0]:
                    known[now] = new
    found = []
    for passed, (_, last) in reached.get(None, {}).items():
        rest = []
        while last is not None:
            at, last = last
            rest.append(at)
        parts = (sorted(passed.loop), reversed(rest))
        found.append(Way(*([program.instructions[i] for i in part] for part in parts)))
    return found


def _sorted(following: Callable[[int], list[int | None]]) -> list[int]:
    """Return what can be reached from 0, each before what follows it."""
    left: list[tuple[int, Iterator[int | None]]] = [(0, iter(following(0)))]
    seen, done = {0}, []
    while left:
        at, rest = left[-1]
        after = next((one for one in rest if one is not None and one not in seen), None)
        if after is None:
            done.append(at)
            left.pop()
        else:
            seen.add(after)
            left.append((after, iter(following(after))))
    return done[::-1]


def _loops(program: Program) -> set[frozenset[int]]:
    """Return the loops: what the target of a backward jump leads to and what leads back to it."""
    after = {at: [one for one in program.next(at) if one is not None] for at in range(len(program.instructions))}
    before: dict[int, list[int]] = {}
    for at, following in after.items():
        for one in following:
            before.setdefault(one, []).append(at)

    def reached(start: int, edges: dict[int, list[int]]) -> set[int]:
        seen, left = {start}, [start]
        while left:
            new = set(edges.get(left.pop(), [])) - seen
            seen |= new
            left += new
        return seen

    heads = {(head, at) for at, following in after.items() for head in following if head <= at}
    return {
        frozenset(ahead & reached(head, before)) for head, at in heads if at in (ahead := reached(head, after))
    }


def full_tile(program: Program, work: Work) -> tuple[Way, int]:
    """Return the way that a thread takes in a full tile, and how often it runs the loop.

    Of the ways that do the work, the one with the fewest accesses to memory. Ways to one loop may differ before
    it, where a division of large numbers has a short way for small ones: the longest counts.

    Raises:
        ValueError: there is no such way, or more than one loop.

    """
    fitting = [(way, trips) for way in ways(program) if (trips := way.trips(work)) is not None]

    def accesses(way: Way, trips: int) -> int:
        rest, loop = (sum(bool(one.load or one.store) for one in part) for part in (way.rest, way.loop))
        return rest + trips * loop

    fewest = min((accesses(*one) for one in fitting), default=0)
    best = [one for one in fitting if accesses(*one) == fewest]
    if len({(id(way.loop[0]) if way.loop else None, trips) for way, trips in best}) != 1:
        raise ValueError(f"{len(best)} ways through the kernel do {work}: expected 1 of {len(ways(program))}")
    return max(best, key=lambda one: sum(each.counted for each in one[0].rest))


def longest(program: Program) -> Way:
    """Return the way of the most instructions through a kernel without loops, rare branches included."""
    return max(ways(program, guarded=True), key=lambda way: sum(one.counted for one in way.rest))


def count(way: Way, trips: int, work: Work) -> tuple[float, float]:
    """Return the instructions an element of a full tile, and how many of these are not the loop's.

    The second is what the first exceeds the loop by, over the elements of one trip: a trip that was peeled off
    counts as the loop's. If the compiler wrote the rows out, all are outside.
    """
    loop, rest = (sum(one.counted for one in part) for part in (way.loop, way.rest))
    total = (trips * loop + rest) / work.elements
    if not trips:
        return total, total
    return total, total - loop * work.reads / sum(one.load for one in way.loop)


def compiled(
    function: Any,
    kinds: Mapping[str, str],
    dtype: str,
    target: str,
    threads: int,
    constants: Mapping[str, Any] = MappingProxyType({}),
    multiples: Collection[str] = (),
    **options: Any,
) -> Any:
    """Compile a kernel ahead of time, as the runtime's launch would.

    Args:
        function: what Triton compiles.
        kinds: types of its arguments; others point to numbers of `dtype`.
        dtype, target: what for.
        threads: of a program.
        constants: arguments that are constants.
        multiples: arguments that are multiples of 16, as all pointers are.
        options: of the compiler.

    """
    names = function.arg_names
    constants = {name: value for name, value in constants.items() if name in names}
    signature = {name: "constexpr" if name in constants else kinds.get(name, f"*{dtype}") for name in names}
    aligned = [i for i, (name, kind) in enumerate(signature.items()) if kind[0] == "*" or name in multiples]
    return triton.compile(
        ASTSource(
            fn=function,
            signature=signature,
            constexprs={(names.index(name),): value for name, value in constants.items()},
            attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
        ),
        target=TARGETS[target],
        options={"enable_fp_fusion": True, **options, "num_warps": threads // TARGETS[target].warp_size},
    )


@dataclass(frozen=True)
class OfModule:
    """A kernel and how it is launched.

    Attributes:
        module: name of its module.
        pass_: forward or backward.
        registered: the activation, gate or formula whose kernel it is.

    """

    module: str
    pass_: str
    registered: Any

    @classmethod
    def of(cls, module: str, pass_: str, *options: Any) -> Self:
        """Return a kernel of a generated module."""
        return cls(module, pass_, find(importlib.import_module(f"fitact.generated.{module}")._KEY), *options)


@dataclass(frozen=True)
class Kernel(OfModule):
    """A kernel of an activation, or another `own` that is launched as that is."""

    own: Any = None

    @property
    def function(self) -> Any:
        """What is compiled; its arguments are some of x, y, codes, n, or of dy, x, y, codes, dx, n."""
        return self.own or getattr(self.registered, self.pass_)

    def threads(self, *dtypes: str) -> int:
        """Return the threads of a program."""
        return self.registered.threads(*(torch.empty(0, dtype=FLOATS[dtype]) for dtype in dtypes))

    def work(self, dtype: str) -> Work:
        """Return what a thread has to do in a full tile."""
        elements = TILE // self.threads(dtype)
        size = DTYPES[dtype].itemsize
        codes = elements * self.registered.bits // 8
        if self.pass_ == "forward":
            return Work(elements, size, size, writes_once=codes)
        rows = {"dy", "x", "y"} & set(self.function.arg_names[:-2])
        return Work(elements, size * len(rows), size, reads_once=codes)

    def compile(self, dtype: str, target: str, output: str | None = None) -> Any:
        """Compile ahead of time, as the runtime's launch would; `output` is the dtype of y and dy, if another."""
        kinds = {"codes": "*u8", "n": "i64", "y": f"*{output or dtype}", "dy": f"*{output or dtype}"}
        return compiled(self.function, kinds, dtype, target, self.threads(dtype, output or dtype))


@dataclass(frozen=True)
class GateKernel(OfModule):
    """A kernel of a gate; `view`: whether g and u are rows of longer ones, where they are read as they are."""

    view: bool = False

    def threads(self, dtype: str) -> int:
        """Return the threads of a program."""
        return threads_of(FLOATS[dtype])

    def work(self, dtype: str) -> Work:
        """Return what a thread has to do in a full tile."""
        elements, size = TILE // self.threads(dtype), DTYPES[dtype].itemsize
        return Work(elements, 2 * size, size) if self.pass_ == "forward" else Work(elements, 3 * size, 2 * size)

    def compile(self, dtype: str, target: str) -> Any:
        """Compile ahead of time, as the runtime's launch would."""
        function = getattr(self.registered, self.pass_)
        rows = [name for name in function.arg_names if name.startswith(("width", "stride"))]
        kinds = {"n": "i64"} | dict.fromkeys(rows, "i32")
        constants = {} if self.view else dict.fromkeys(rows)
        return compiled(function, kinds, dtype, target, self.threads(dtype), constants, rows if self.view else ())


@dataclass(frozen=True)
class BlockKernel:
    """A kernel of block codes, for a tensor of many rows.

    Attributes:
        bits: of a code.
        pass_: encode or decode.
        rest: whether it is for the elements that are left over.

    """

    bits: int
    pass_: str
    rest: bool = False

    @property
    def module(self) -> str:
        """Its name in tables."""
        return f"blocks{self.bits}"

    def work(self, dtype: str) -> Work:
        """Return how many elements a thread has; each row may end the tensor, so all accesses have a predicate."""
        return Work(blocks.BLOCK**2 // block_kernels.THREADS, 0, 0)

    def compile(self, dtype: str, target: str) -> Any:
        """Compile ahead of time, as the runtime's launch would."""
        function = getattr(block_kernels, f"{self.pass_}_tile")
        kinds = {"x": f"*{dtype}", "codes": "*i64", "scales": "*bf16", "shifts": "*i64"}
        kinds |= dict.fromkeys(("rows", "across", "n"), "i32")
        constants = blocks.constants(self.pass_, self.bits, FLOATS[dtype], signs=False) | {"rest": self.rest}
        options = blocks.launching(torch.device("cpu"))
        return compiled(function, kinds, dtype, target, block_kernels.THREADS, constants, **options)


@dataclass(frozen=True)
class Cost:
    """What a kernel costs.

    Attributes:
        registers: a thread's.
        spills: NVIDIA: bytes of stack and local memory; AMD: registers spilled and bytes of scratch.
        load_bytes, store_bytes: the widest accesses to global memory on the path of a full tile.
        instructions: an element of a full tile.
        outside: how many of these are not of the loop over the rows.

    """

    registers: int
    spills: int
    load_bytes: int
    store_bytes: int
    instructions: float
    outside: float

    def row(self) -> dict[str, float]:
        """Return the row of the table."""
        return {name: round(value, 2) for name, value in asdict(self).items()}


class Code(NamedTuple):
    """The machine code of a compiled kernel.

    Attributes:
        text: as the assembler would read it, if it was asked for.
        registers: a thread's.
        spills: NVIDIA: bytes of stack and local memory; AMD: registers spilled and bytes of scratch.
        shared: bytes of memory that the threads of a program share.

    """

    text: str
    registers: int
    spills: int
    shared: int


def resources(asm: Any, code: str = "") -> Code:
    """Return what a kernel takes, as its compiler notes it: a hundredth of the time of `machine_code`."""
    if "cubin" not in asm:
        text = asm["amdgcn"]
        spills = sum(_field(rf"\.{what}:\s+(\d+)", text) for what in SPILLED)
        shared = _field(r"\.group_segment_fixed_size:\s+(\d+)", text)
        return Code(code, _field(r"\.vgpr_count:\s+(\d+)", text), spills, shared)
    usage = _tool("cuobjdump", asm["cubin"], "-res-usage")
    registers, stack, local, shared = (
        _field(rf"\b{what}:(\d+)", usage) for what in ("REG", "STACK", "LOCAL", "SHARED")
    )
    return Code(code, registers, stack + local, shared)


def machine_code(asm: Any) -> Code:
    """Return what the tools of the GPU's maker say of what was compiled."""
    # no data flow: it is not asked for, and it takes time
    text = _tool("nvdisasm", asm["cubin"], "-c", "-ndf") if "cubin" in asm else asm["amdgcn"]
    return resources(asm, text)


def machine_codes(asms: Sequence[Any], target: str) -> list[Code]:
    """Return the same of many kernels for one target; the texts of NVIDIA's have no directives.

    The disassembler takes as long to start as for a hundred kernels, so their instructions are given to it as one
    piece, and what it prints is cut again.
    """
    if "cubin" not in asms[0]:
        return [machine_code(asm) for asm in asms]
    sections = [_instructions(asm["cubin"]) for asm in asms]
    text = _tool("nvdisasm", b"".join(section.code for section in sections), "-b", target.replace("sm_", "SM"))
    lines = [line for line in text.splitlines() if _NVIDIA.match(line)]
    ends = list(accumulate(len(section.code) // _NVIDIA_SIZE for section in sections))
    if len(lines) != ends[-1]:
        raise ValueError(f"nvdisasm printed {len(lines)} instructions: expected {ends[-1]}")
    return [
        resources(asm, _labelled(lines[start:end], start * _NVIDIA_SIZE, section.subroutines))
        for asm, section, start, end in zip(asms, sections, [0, *ends], ends, strict=False)
    ]


def _labelled(lines: Sequence[str], start: int, subroutines: Collection[int]) -> str:
    """Return instructions, the first of which is at an address, with labels as goals of their jumps and calls."""
    goals = set()

    def named(jump: re.Match[str]) -> str:
        goals.add(int(jump[2], 16))
        kind = "$" if int(jump[2], 16) - start in subroutines else ".L_"
        return f"{jump[1]}`({kind}{jump[2]}){jump[3]}"

    lines = [_NVIDIA_JUMP.sub(named, line) for line in lines]
    labels = {at: f".L_{at:#x}:\n" for at in goals}
    return "\n".join(labels.get(start + i * _NVIDIA_SIZE, "") + line for i, line in enumerate(lines))


def measure(kernels: Sequence[tuple[Kernel | GateKernel | BlockKernel, str]], target: str) -> list[Cost]:
    """Compile kernels, each for a dtype, and read off what they cost on a target."""
    asms = [kernel.compile(dtype, target).asm for kernel, dtype in kernels]
    found = zip(machine_codes(asms, target), asms, kernels, strict=True)
    return [_cost(code, asm, kernel.work(dtype)) for code, asm, (kernel, dtype) in found]


def _cost(code: Code, asm: Any, work: Work) -> Cost:
    program = nvidia(code.text) if "cubin" in asm else amd(code.text)
    way, trips = full_tile(program, work) if work.reads else (longest(program), 0)
    return Cost(
        code.registers,
        code.spills,
        max(one.load for one in way.loop + way.rest),
        max(one.store for one in way.loop + way.rest),
        *count(way, trips, work),
    )


class _Section(NamedTuple):
    """The instructions of an ELF file, and where in them its subroutines start."""

    code: bytes
    subroutines: frozenset[int]


def _instructions(cubin: bytes) -> _Section:
    """Return the one section of an ELF file of 64 bits that has instructions."""
    (start,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count = struct.unpack_from("<HH", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", cubin, start + i * size) for i in range(count)]
    ((_, _, _, _, offset, length),) = [one for one in sections if one[2] & 4]  # SHF_EXECINSTR
    ((_, _, _, _, table, entries),) = [one for one in sections if one[1] == 2]  # SHT_SYMTAB
    symbols = struct.iter_unpack("<IBBHQQ", cubin[table : table + entries])
    functions = frozenset(value for _, info, _, _, value, _ in symbols if info & 15 == 2)  # STT_FUNC
    return _Section(cubin[offset : offset + length], functions - {0})


def _tool(name: str, code: bytes, *options: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        return subprocess.run(
            [TOOLS / name, *options, file.name], capture_output=True, text=True, check=True
        ).stdout


def _field(pattern: str, text: str) -> int:
    (value,) = re.findall(pattern, text)
    return int(value)
