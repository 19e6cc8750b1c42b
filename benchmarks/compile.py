"""Compiles every kernel for GPUs that need not be there, and reads in the result what it will cost.

python -m benchmarks.kernels --compile
"""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from commhooks.triton_kernels import cast, factors, powersgd, tiles, topk

# Name, and the shared memory a block can have there: CUDA C Programming Guide, compute capabilities; CDNA 3 ISA guide.
TARGETS = {
    "sm_80": (GPUTarget("cuda", 80, 32), 163 * 1024),
    "sm_90": (GPUTarget("cuda", 90, 32), 227 * 1024),
    "sm_100": (GPUTarget("cuda", 100, 32), 227 * 1024),
    "gfx942": (GPUTarget("hip", "gfx942", 64), 64 * 1024),
}
# On the stack there should be nothing; but the ptxas of older Tritons saves registers around a division's slow path.
STACK = 0 if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9) else 64
RANKS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Case:
    """A kernel as a launcher starts it: argument types and constants in the order of its arguments.

    `bytes_moved` an element, and the `fewest` that the operation can do with; None where an operation is not bound by
    memory. `wide`: loads of large tensors must be 16 bytes a thread; `wide_stores`: and stores.
    """

    name: str
    kernel: Any
    types: tuple[str, ...]
    constants: dict[str, Any]
    warps: int
    bytes_moved: float | None = None
    fewest: float | None = None
    wide: bool = True
    wide_stores: bool = True


@dataclass(frozen=True)
class Compiled:
    """What was found. Widths are of global loads and stores, in bytes a thread. `rounding` matrix instructions take
    float32 with fewer bits (TF32); gfx942 has some that take it whole.
    """

    case: Case
    target: str
    registers: int
    spills: int
    stack: int
    shared: int
    loads: list[int]
    stores: list[int]
    fmas: int
    rounding: int

    @property
    def faults(self) -> list[str]:
        """What is against the rules: no spills, no stack, no more shared memory than there is, wide access, no TF32."""
        limit = TARGETS[self.target][1]
        wide_stores = self.case.wide and self.case.wide_stores and self.stores != []
        rules = (
            (self.spills > 0, f"{self.spills} spills"),
            (self.stack > STACK, f"{self.stack} bytes of stack"),
            (self.shared > limit, f"{self.shared} bytes of shared memory, of {limit}"),
            (self.case.wide and 16 not in self.loads, f"loads of {self.loads} bytes"),
            (wide_stores and 16 not in self.stores, f"stores of {self.stores} bytes"),
            (self.rounding > 0, "matrix instructions that round float32"),
        )
        return [text for broken, text in rules if broken]


def cases() -> list[Case]:
    return [*_cast_cases(), *_projection_cases(), *_factor_cases(), *_block_topk_cases(), *_exact_topk_cases()]


def _cast_cases() -> list[Case]:
    found: list[Case] = []
    for gradient, size in (("fp32", 4), ("bf16", 2)):
        back = ("*bf16", f"*{gradient}", "i32", "fp32")
        block = {"BLOCK": cast.BLOCK}
        found.append(Case(f"from_wire_ {gradient}", cast._from_wire, back, block, cast.WARPS, size + 2, size + 2))
        there = (f"*{gradient}", "*fp32", "*bf16", "*fp32", "i32", "fp32")
        for residual in (True, False):
            constants = {"HAS_RESIDUAL": residual} | block
            moved = size + 2 + (8 if residual else 0)
            of = f"{gradient}{', residual' if residual else ''}"
            found.append(Case(f"to_wire {of}", cast._to_wire, there, constants, cast.WARPS, moved, moved))
    return found


def _projection_cases() -> list[Case]:
    found: list[Case] = []
    for transposed, split in ((False, tiles.TILE_COLS), (True, tiles.TILE_T_ROWS)):
        for gradient, size in (("fp32", 4), ("bf16", 2)):
            for rank in RANKS:
                constants = powersgd.projection_constants(rank, transposed=transposed)
                warps = constants.pop("num_warps")
                constants |= {"HAS_RESIDUAL": True, "STORE_M": True, "TRANSPOSED": transposed, "ALIGN": 16}
                types = (f"*{gradient}", "*fp32", "*fp32", "*fp32", "*fp32", "*i64")
                fewest = size + 8
                name = f"project{'_t' if transposed else ''} {gradient} rank {rank}"
                moved = fewest + 8 * rank / split  # partial sums, written and read
                memory_bound = rank < max(RANKS)  # 64 products an element take longer than its 12 bytes
                found.append(Case(name, powersgd._project, types, constants, warps, moved, fewest, wide=memory_bound))
    return found


def _factor_cases() -> list[Case]:
    chunk = {"CHUNK": tiles.CHUNK}
    out = {"ALIGN": 16, "ROWS": tiles.TILE_OUT_ROWS, "COLS": tiles.TILE_OUT_COLS}
    sums = ("*fp32", "*fp32", "*fp32", "*fp32", "*bf16", "*fp32", "*i64", "fp32")
    flags = {"HAS_RESIDUAL": True, "STORE_M": True}
    found = [
        Case("sum of partials", powersgd._sum_partials, sums, flags | chunk, 4, wide=False),
        Case("magnitudes", factors._magnitudes, ("*bf16", "*bf16", "*i32", "*i64", "i32", "i32", "i32"), chunk, 4,
             wide=False),
        Case("largest", factors._largest, ("*bf16", "*i32", "i32"), {"BLOCK": factors.LARGEST_BLOCK}, 8, 2, 2),
        Case("keep_factor_", factors._keep_factor,
             ("*fp32", "*bf16", "*fp32", "*i8", "*fp32", "*i64", "*i64", "fp32"), chunk, 4, wide=False),
    ]  # fmt: skip
    for rank in RANKS:
        constants = factors.orthogonalize_constants(rank)
        warps = constants.pop("num_warps")
        types = ("*bf16", "*fp32", "*i8", "*i64", "fp32", "fp32")
        found.append(Case(f"orthogonalize rank {rank}", factors._orthogonalize, types, constants, warps, wide=False))
    for gradient, size in (("fp32", 4), ("bf16", 2)):
        tensors = (
            "*fp32",
            "*bf16",
            "*bf16",
            "*bf16",
            "*fp32",
            "*fp32",
            "*fp32",
            f"*{gradient}",
            "*fp32",
            "*i64",
        )
        constants = {"HAS_RESIDUAL": True} | out
        moved = 8 + size
        found.append(Case(f"reconstruct_ {gradient}", powersgd._reconstruct, tensors, constants, 8, moved, moved))
    return found


def _block_topk_cases() -> list[Case]:
    found: list[Case] = []
    for gradient, size in (("fp32", 4), ("bf16", 2)):
        for block, warps in ((256, 1), (1024, 2), (8192, 16)):
            k = block // 100
            indices = "*u8" if block <= 256 else "*i16"
            choose = (f"*{gradient}", "*fp32", "*fp32", "*bf16", indices, "*u8", "i32", "i32", "i32")
            constants = {"HAS_RESIDUAL": True, "BLOCK": block, "SLOTS": triton.next_power_of_2(k)}
            moved = size + 8  # and the few entries
            found.append(
                Case(
                    f"select_blocks {gradient} of {block}", topk._select_blocks, choose, constants, warps, moved, moved
                )
            )
            add = ("*bf16", indices, "*fp32", f"*{gradient}", *["i32"] * 5, "fp32")
            constants = {"BLOCK": block, "CHUNK": topk._entries_at_once(k, warps), "FINISH": True}
            moved = size if gradient == "fp32" else size + 4  # a float32 sum apart
            found.append(
                Case(f"sum_blocks_ {gradient} of {block}", topk._sum_blocks, add, constants, warps, moved, size)
            )
    return found


def _exact_topk_cases() -> list[Case]:
    block = {"BLOCK": 4096}
    m, digits, counts = "*fp32", "*i64", "*i32"
    found = [
        Case("select_exact, count", topk._count_sent, (m, digits, counts, "i32", "i32"), block, 8, 4, 4,
             wide_stores=False),
        Case("select_exact, send", topk._send, (m, digits, counts, "*i64", "*bf16", "*i32", "i32", "i32"), block, 8, 8,
             8, wide=False),
    ]  # fmt: skip
    found += [
        Case(f"select_exact, digit {digit}", topk._count_digit, (m, digits, "i32", "i32"), {"DIGIT": digit} | block, 8,
             4, 4)
        for digit in (1, 2, 3)
    ]  # fmt: skip
    for gradient, size in (("fp32", 4), ("bf16", 2)):
        first = (f"*{gradient}", "*fp32", m, digits, "i32")
        constants: dict[str, Any] = {"HAS_RESIDUAL": True} | block
        found.append(
            Case(f"select_exact {gradient}, digit 0", topk._count_first_digit, first, constants, 8, size + 8, size + 8)
        )
        add = ("*bf16", "*i32", "*fp32", f"*{gradient}", "i32", "i32", "i32", "fp32")
        constants = {"RANKS": 8, "STEPS": 17, "CHUNK": 64, "FINISH": True} | block
        found.append(Case(f"sum_sparse_ {gradient}", topk._sum_sparse, add, constants, 8, size, size, wide=False))
    return found


def compile_case(case: Case, target: str) -> Compiled:
    """Compile for `target`, as the launcher would: pointers are multiples of 16 bytes, as torch allocates them."""
    arguments = case.kernel.arg_names
    runtime = [name for name in arguments if name not in case.constants]
    signature = dict.fromkeys(arguments, "constexpr") | dict(zip(runtime, case.types, strict=True))
    constants = {(arguments.index(name),): value for name, value in case.constants.items()}
    aligned = {(arguments.index(x),): [["tt.divisibility", 16]] for x in runtime if signature[x].startswith("*")}
    source = ASTSource(fn=case.kernel, signature=signature, constexprs=constants, attrs=aligned)
    gpu = TARGETS[target][0]
    compiled = triton.compile(source, target=gpu, options={"num_warps": case.warps, "enable_fp_fusion": True})
    shared = compiled.metadata.shared
    read = _read_cuda if gpu.backend == "cuda" else _read_hip
    return Compiled(case, target, shared=shared, **read(compiled.asm))


def _read_cuda(asm: dict[str, Any]) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    numbers = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    ptx = asm["ptx"]
    copies = re.findall(r"cp\.async\.\S+ \[[^]]*\], \[[^]]*\], (0x\w+|\d+)", ptx)
    return {
        "registers": numbers["REG"],
        "spills": numbers["LOCAL"],
        "stack": numbers["STACK"],
        "loads": sorted({*_widths(r"ld\.global", ptx), *(int(x, 0) for x in copies)}),
        "stores": _widths(r"st\.global", ptx),
        "fmas": len(re.findall(r"fma\.rn\.f32", ptx)),
        "rounding": len(re.findall(r"\b(?:mma|wgmma|tcgen05\.mma)\.", ptx)),
    }


def _widths(instruction: str, ptx: str) -> list[int]:
    found = re.findall(instruction + r"(?:\.\w+)*?(?:\.v(\d))?\.[bfsu](\d+)\b", ptx)
    return sorted({int(count or 1) * int(bits) // 8 for count, bits in found})


def _read_hip(asm: dict[str, Any]) -> dict[str, Any]:
    text = asm["amdgcn"]
    numbers = {name: int(value) for name, value in re.findall(r"^\s*\.(\w+): +(\d+)$", text, re.MULTILINE)}
    words = {"ubyte": 1, "ushort": 2, "byte": 1, "short": 2, "dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16}

    def widths(kind: str) -> list[int]:
        return sorted({words.get(x, 0) for x in re.findall(rf"(?:global|buffer|flat)_{kind}_(\w+)", text)})

    return {
        "registers": numbers["vgpr_count"],
        "spills": numbers["vgpr_spill_count"],
        "stack": numbers["private_segment_fixed_size"],
        "loads": widths("load"),
        "stores": widths("store"),
        "fmas": len(re.findall(r"v_(?:pk_)?(?:fma|fmac|mfma)_f32", text)),
        "rounding": len(re.findall(r"v_mfma_\w+xf32", text)),
    }
