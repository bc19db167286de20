"""What devices send each other is read from a compiled program's text."""

import pytest

from flax_transformer.collectives import sent_bytes

PROGRAM = """HloModule jit_f, is_scheduled=true, num_partitions=8

%add (a: f32[], b: f32[]) -> f32[] {{
  ROOT %sum = f32[] add(%a, %b)
}}

%condition (p: (s32[], f32[3,5])) -> pred[] {{
  %limit = s32[]{{:T(128)}} constant(7)
  ROOT %lt = pred[] compare(%i, %limit), direction=LT
}}

%body (p: (s32[], f32[3,5])) -> (s32[], f32[3,5]) {{
  {inside}
}}

ENTRY %main (x: f32[3,5]) -> f32[3,5] {{
  {outside}
  %w = (s32[], f32[3,5]{{1,0}}) while(%t), condition=%condition, body=%body
}}
"""


def sent(outside: str = "", inside: str = "") -> dict[str, float]:
    return sent_bytes(PROGRAM.format(outside=outside, inside=inside))


ARRAY = 4 * 3 * 5  # bytes


@pytest.mark.parametrize(
    ("groups", "devices"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", 4),
        ("[4,2]<=[8]", 2),
        ("[1,8]<=[2,4]T(1,0)", 8),
        ("mesh['d'=4,'t'=2] {'d'}", 4),
        ("mesh['d'=4,'t'=2] {'d','t'}", 8),
        ("mesh['d'=4,'t'=2] {'d':(1)2}", 2),
        ("{}", 8),
    ],
)
def test_a_sum_over_n_devices_sends_its_array_twice_but_for_one_share(groups, devices):
    line = f"%r = f32[3,5]{{1,0}} all-reduce(%x), channel_id=1, replica_groups={groups}, to_apply=%add"
    assert sent(line) == {"all-reduce": pytest.approx(2 * ARRAY * (devices - 1) / devices)}


@pytest.mark.parametrize(
    ("line", "kind", "bytes_sent"),
    [
        ("%g = bf16[3,8]{1,0} all-gather(%x), replica_groups=[2,4]<=[8]", "all-gather", 48 * 3 / 4),
        ("%g = (f32[3,2], f32[3,8]) all-gather-start(%x), replica_groups=[2,4]<=[8]", "all-gather", 96 * 3 / 4),
        ("%s = f32[3,2]{1,0} reduce-scatter(%x), replica_groups=[2,4]<=[8]", "reduce-scatter", 24 * 3),
        ("%a = s32[8]{0} all-to-all(%x), replica_groups=[1,8]<=[8]", "all-to-all", 32 * 7 / 8),
        ("%p = f32[3,5]{1,0} collective-permute(%x), source_target_pairs={{0,1}}", "collective-permute", ARRAY),
        ("%r = (f32[3,5], f32[7]) all-reduce(%x, %y), replica_groups=[4,2]<=[8]", "all-reduce", ARRAY + 28),
    ],
)
def test_every_kind_sends_what_its_ring_does(line, kind, bytes_sent):
    assert sent(line) == {kind: pytest.approx(bytes_sent)}


def test_what_a_loop_sends_counts_as_often_as_it_runs():
    line = "%r = f32[3,5]{1,0} all-reduce(%x), replica_groups=[4,2]<=[8], to_apply=%add"
    assert sent(inside=line) == {"all-reduce": 7 * ARRAY}
    assert sent() == {}
