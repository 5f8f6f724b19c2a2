"""What no kernel may contain: vendor math, fast math, float atomics, foreign headers.

And what every decodable type must have: a kernel for each coding, a digest, a code object.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from ds4q.artifact.codings import VARIANTS
from ds4q.artifact.formats import Coding, MixRow
from ds4q.artifact.types import BY_NAME, HFP4G32, RAW, TIDI32, TYPES, TensorType
from ds4q.hipkern.errors import HipUsageError
from ds4q.hipkern.kernels import builds
from ds4q.hipkern.matrix import decoder_of
from ds4q.hipkern.selftest import expected_digests
from ds4q.hipkern.selftest.packed import FORMATS, MULTIPLIED
from ds4q.hipkern.source import FOLDER, load

TARGETS = "ds4q_dev.h"  # the one file that speaks to compilers
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
MATH = (
    r"exp2?|exp10|expm1|log2?|log10|log1p|pow|sin|cos|tan|sincos|sinh|cosh|tanh|asin|acos|atan2?|"
    r"r?sqrt|cbrt|hypot|erfc?|tgamma|lgamma|fma|mad|fmod|remainder|rint|round|floor|ceil|trunc|"
    r"fabs|fmax|fmin|ldexp|frexp"
)
CALLS = re.compile(rf"(?<![\w.])(?:std::|native_|half_)?(?:{MATH})[fl]?\s*\(")
FOREIGN = re.compile(r"\b(?:asm|__\w+|\w*[aA]tomic(?!_add\b)\w*|__half\w*)\b")
FAST = re.compile(
    r"fast.?math|fp_contract|FP_CONTRACT|float_control|reassociate|ffp|optimize|denorm|ftz|"
    r"#\s*pragma\s+(?!once\b|unroll\b|clang force_cuda_host_device\b)"
)
INCLUDES = re.compile(r"#\s*include\s+(\S+)")
KNOWN_TO_TARGETS = re.compile(
    r"__builtin_(fmaf|sqrtf|bit_cast|memcpy|nontemporal_load)|__fmaf_rn|__fsqrt_rn|"
    r"__builtin_amdgcn_(perm|dispatch_ptr|ds_bpermute|fence|mbcnt_hi|mbcnt_lo|s_barrier|"
    r"wave_barrier|workgroup_id_[xyz]|workitem_id_x)|__ATOMIC_(RELAXED|ACQUIRE|RELEASE)|"
    r"__hip_atomic_fetch_add|__HIP_MEMORY_SCOPE_WORKGROUP|__shfl_sync|__syncthreads|__syncwarp|"
    r"__cvta_generic_to_shared|__CUDACC_RTC__|__CUDACC__|__align__|__attribute__|__device__|"
    r"__global__|__launch_bounds__|__shared__"
)
ASSEMBLY = re.compile(r'\basm(?: volatile)?\(\s*"([\w.]+)')
KNOWN_ASSEMBLY = frozenset(
    {
        "cvt.f32.f16",
        "cvt.rn.f16.f32",
        "cp.async.cg.shared.global",
        "cp.async.commit_group",
        "cp.async.wait_group",
        "ld.global.nc.L1",
        "ld.global.nc.v4.f32",
        "prmt.b32",
    }
)


def broken_rules(name: str, text: str) -> Iterator[str]:
    """What a kernel source of this name must not contain."""
    code = COMMENT.sub("", text)
    for call in CALLS.findall(code):
        yield f"{name}: calls {call}"
    for words in FAST.findall(code):
        yield f"{name}: {words}"
    for header in INCLUDES.findall(code):
        if not (header.startswith('"') and (FOLDER / header.strip('"')).is_file()):
            yield f"{name}: includes {header}"
    for word in FOREIGN.findall(code):
        known = KNOWN_TO_TARGETS.fullmatch(word) or not word.startswith("__")
        if name != TARGETS or not known:
            yield f"{name}: {word}"
    for instruction in ASSEMBLY.findall(code):
        if instruction not in KNOWN_ASSEMBLY:
            yield f"{name}: assembly {instruction}"


def test_kernels_keep_the_rules() -> None:
    sources = sorted([*FOLDER.glob("*.hip"), *FOLDER.glob("*.h")])
    assert len(sources) >= 8
    found = [rule for path in sources for rule in broken_rules(path.name, path.read_text("utf-8"))]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    "line",
    [
        "y = expf(x);",
        "y = exp(x);",
        "y = __expf(x);",
        "y = std::exp(x);",
        "y = logf(x);",
        "y = __logf(x);",
        "y = log1pf (x);",
        "y = sinf(x);",
        "y = __sinf(x);",
        "y = cos(x);",
        "y = powf(x, y);",
        "y = rsqrtf(x);",
        "y = __frcp_rn(x);",
        "y = __fdividef(x, y);",
        "y = __builtin_expf(x);",
        "y = __builtin_amdgcn_rcpf(x);",
        "y = __nv_fast_expf(x);",
        "y = __ocml_exp_f32(x);",
        "y = native_exp(x);",
        "y = fmaf(a, b, c);",
        "y = sqrtf(x);",
        "#pragma STDC FP_CONTRACT ON",
        "#pragma clang fp reassociate(on)",
        "#pragma clang fp contract(fast)",
        "#pragma float_control(precise, off)",
        '__attribute__((optimize("-ffast-math")))',
        "atomicAdd(at, 1.0f);",
        "unsafeAtomicAdd(at, 1.0f);",
        "__hip_atomic_fetch_add(at, 1.0f);",
        "#include <math.h>",
        "#include <hip/hip_runtime.h>",
        '#include "hip_fp16.h"',
        'asm("ex2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));',
        "__half h = __float2half(x);",
    ],
)
def test_a_broken_rule_is_seen(line: str) -> None:
    assert list(broken_rules("k.hip", f'#include "ds4q_dev.h"\n  {line}\n'))


@pytest.mark.parametrize("line", ["y = __expf(x);", 'asm("ex2.approx.f32 %0, %1;");', "expf(x);"])
def test_a_broken_rule_is_seen_in_the_header_of_targets(line: str) -> None:
    assert list(broken_rules(TARGETS, line))


@pytest.mark.parametrize(
    "line",
    [
        "y = ds4q_exp(x) + cos[pair] * sin[pair];",
        "ds4q_turn(a, b, cos[i], sin[i]);",
        "y = ds4q_sqrt(x); // not sqrtf(x), nor atomicAdd",
        "ds4q_atomic_add(count, 1u);",
        "#pragma once",
    ],
)
def test_what_kernels_may_do_is_not_reported(line: str) -> None:
    assert list(broken_rules("k.hip", line)) == []


# ---------------------------------------------------------------- types


def codings(kind: TensorType) -> list[Coding | None]:
    """Every way in which a type is read; a row of a decode table stands for its mode."""
    if kind.coding == "variant":
        return list(VARIANTS[kind.id][1])
    return [MixRow(0, b""), MixRow(1, b"")] if kind.coding == "row" else [None]


def same_coding(a: Coding | None, b: Coding | None) -> bool:
    if isinstance(a, MixRow) and isinstance(b, MixRow):
        return a.mode == b.mode
    return a == b


def lacking(kinds: Iterable[TensorType]) -> list[str]:
    """What the decodable types of floats among ``kinds`` lack on a device."""
    built = [(file, tuple(defines.items())) for file, defines in builds()]
    digests = expected_digests()
    missing = []
    for kind in kinds:
        if not kind.codec or kind in (TIDI32, RAW):
            continue
        for coding in codings(kind):
            name = f"{kind.name} {coding or ''}".strip()
            try:
                decoder = decoder_of(kind.id, coding)
            except HipUsageError:
                missing.append(f"{name}: no decoder")
                continue
            labels = [
                form.label
                for form in FORMATS
                if form.kind is kind and same_coding(form.coding, coding)
            ]
            products = [form.label for form in MULTIPLIED if form.decoder == decoder]
            for file in ("decode.hip", "linear.hip", "moe.hip"):
                for kernel in load(file).kernels:
                    given = labels if kernel in ("decode_f32", "decode_f16") else products
                    told = digests.get(f"{file} {kernel}", {})
                    if not any(label in told for label in given):
                        missing.append(f"{name}: no digest of {file} {kernel}")
            macros = (("DS4Q_DECODER", decoder),)
            missing += [
                f"{name}: no code object of {file}"
                for file in ("decode.hip", "linear.hip")
                if (file, macros) not in built
            ]
            if not any(file == "moe.hip" and ("DS4Q_GATE", decoder) in m for file, m in built):
                missing.append(f"{name}: no code object of moe.hip")
    return missing


def test_every_type_has_kernels_digests_and_code_objects() -> None:
    assert lacking(TYPES.values()) == []


def test_a_type_without_is_seen() -> None:
    named = BY_NAME["HFQ4G256"]  # a type without a codec; with one it would need a kernel
    assert lacking([named]) == []
    assert lacking([dataclasses.replace(named, codec="plain")]) == ["HFQ4G256: no decoder"]


def test_a_type_whose_digest_is_missing_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    without = {kernel: dict(found) for kernel, found in expected_digests().items()}
    del without["linear.hip linear"]["HFP4G32"]
    monkeypatch.setitem(globals(), "expected_digests", lambda: without)
    assert lacking([HFP4G32]) == ["HFP4G32: no digest of linear.hip linear"]


def test_a_type_that_is_not_built_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def few(folder: Path = FOLDER) -> list[tuple[str, dict[str, int]]]:
        return [("decode.hip", {"DS4Q_DECODER": 21}), ("moe.hip", {"DS4Q_GATE": 21})]

    monkeypatch.setitem(globals(), "builds", few)
    assert lacking([HFP4G32]) == ["HFP4G32: no code object of linear.hip"]
