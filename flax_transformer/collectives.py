"""What a compiled program sends between devices, read from its text.

compiled = jax.jit(step).lower(*arguments).compile()
traffic = sent_bytes(compiled.as_text())                # {"all-reduce": 497_000_000}, for each device
"""

import collections
import math
import re

_KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_INSTRUCTION = re.compile(rf"= (?P<shape>.*?) (?P<kind>{'|'.join(_KINDS)})(?P<start>-start)?\(")
_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\{$")
_CALLED = re.compile(r"(?:calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_LOOP = re.compile(r"condition=%?([\w.\-]+), body=%?([\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+(?:e\dm\d\w*)?)\[([\d,]*)\]")


def sent_bytes(program: str) -> dict[str, float]:
    """The bytes that each device sends, by kind of collective, as the usual ring algorithms send them.

    With n devices in a group and s bytes in the whole array, a device sends s (n - 1) / n in an all-gather, a
    reduce-scatter or an all-to-all, twice that in an all-reduce, and s in a permutation.

    Args:
        program: the text of a compiled module ("HLO"), as `jax.stages.Compiled.as_text` gives it.

    A loop's body counts as often as it runs, where the text tells; every branch of a conditional counts.
    """
    computations, entry = _split(program)
    total: dict[str, float] = collections.defaultdict(float)
    _add(entry, 1, computations, _devices(program), total)
    return {kind: size for kind, size in total.items() if size}


def _add(name: str, times: int, computations: dict[str, list[str]], devices: int, total: dict[str, float]) -> None:
    for line in computations.get(name, ()):
        if found := _INSTRUCTION.search(line):
            total[found["kind"]] += times * _sent(line, found, devices)
            continue  # what it calls adds two numbers
        if loop := _LOOP.search(line):
            condition, body = loop.groups()
            _add(body, times * _trips(line, computations.get(condition, [])), computations, devices, total)
            continue
        called = _CALLED.findall(line)
        for branches in _BRANCHES.findall(line):
            called += [branch.strip().lstrip("%") for branch in branches.split(",")]
        for inner in called:
            _add(inner, times, computations, devices, total)


def _split(program: str) -> tuple[dict[str, list[str]], str]:
    computations: dict[str, list[str]] = {}
    entry, current = "", []
    for line in program.splitlines():
        if header := _COMPUTATION.match(line):
            current = computations.setdefault(header["name"], [])
            entry = header["name"] if header["entry"] else entry
        else:
            current.append(line)
    return computations, entry


def _trips(line: str, condition: list[str]) -> int:
    """How often a loop runs: as its line says, or its condition, which compares a counter with a constant."""
    if known := _TRIPS.search(line):
        return int(known[1])
    limits = [int(limit) for text in condition for limit in re.findall(r"= s32\[\]\S* constant\((\d+)\)", text)]
    return max(limits, default=1)


def _sent(line: str, found: re.Match[str], devices: int) -> float:
    arrays = [_size(*array) for array in _ARRAY.findall(found["shape"])]
    if found["start"] and found["shape"].startswith("("):
        arrays = arrays[len(arrays) // 2 :] if found["kind"] != "collective-permute" else arrays[1:2]
    size, devices = sum(arrays), _group_size(line, devices)
    if found["kind"] == "collective-permute":
        return size
    if found["kind"] == "reduce-scatter":  # its result is one share
        size *= devices
    return size * (devices - 1) / devices * (2 if found["kind"] == "all-reduce" else 1)


def _devices(program: str) -> int:
    header = program.partition("\n")[0]
    counts = re.findall(r"(?:num_partitions|replica_count)=(\d+)", header)
    return math.prod(int(count) for count in counts)


def _group_size(line: str, devices: int) -> int:
    """How many devices exchange with each other; no groups: all of them."""
    if iota := re.search(r"replica_groups=\[\d+,(\d+)\]<=", line):
        return int(iota[1])
    if mesh := re.search(
        r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}", line
    ):  # a whole axis, or 'axis':(before)size
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", mesh[1]))
        parts = re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", mesh[2])
        return math.prod(int(part or sizes[axis]) for axis, part in parts)
    listed = re.search(r"replica_groups=\{\{([\d,]*)\}", line)
    return len(listed[1].split(",")) if listed else devices


def _size(dtype: str, shape: str) -> int:
    count = 1
    for length in filter(None, shape.split(",")):
        count *= int(length)
    bits = re.search(r"\d+", dtype)
    return count * (int(bits[0]) if bits else 8) // 8
