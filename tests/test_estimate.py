"""The closed formulas give the figures of the ZeRO paper and the bytes of this library's layout."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest

from onecopy import Offload
from onecopy.errors import ConfigError
from onecopy.planner import estimate

# ZeRO paper, Table 1: model states per device in GB (1e9 bytes), mixed-precision Adam.
# One row a degree of data parallelism; 7.5B, 128B and 1T parameters at stages 1, 2, 3.
TABLE_1 = """
1,120,120,120,2048,2048,2048,16000,16000,16000
4,52.5,41.3,30,896,704,512,7000,5500,4000
16,35.6,21.6,7.5,608,368,128,4750,2875,1000
64,31.4,16.6,1.88,536,284,32,4187,2218,250
256,30.4,15.4,0.47,518,263,8,4046,2054,62.5
1024,30.1,15.1,0.12,513,257,2,4011,2013,15.6
"""
SIZES = (7_500_000_000, 128_000_000_000, 1_000_000_000_000)


def table_1_cells() -> list[tuple[int, int, int, float]]:
    cells = []
    for line in TABLE_1.split():
        world_size, *figures = line.split(",")
        columns = [(size, stage) for size in SIZES for stage in (1, 2, 3)]
        for (size, stage), figure in zip(columns, figures, strict=True):
            cells.append((int(world_size), size, stage, float(figure)))
    return cells


@pytest.mark.parametrize(("world_size", "size", "stage", "gigabytes"), table_1_cells())
def test_paper_table_1(world_size: int, size: int, stage: int, gigabytes: float) -> None:
    # The paper rounds to a tenth in small figures, and cuts to whole GB in large ones.
    tolerance = 0.06 if gigabytes < 100 else 1.0
    ours = estimate.paper_state_bytes(stage, size, world_size) / 1e9
    assert ours == pytest.approx(gigabytes, abs=tolerance)


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_paper_figure_1(stage: int, gigabytes: float) -> None:
    ours = estimate.paper_state_bytes(stage, SIZES[0], 64) / 1e9
    assert ours == pytest.approx(gigabytes, abs=0.06)


# Bytes per parameter on 4 ranks: parameters, gradients, optimizer states.
HELD = {
    ("fp32", 0): (4, 4, 8),
    ("fp32", 1): (4, 4, 2),
    ("fp32", 2): (4, 1, 2),
    ("fp32", 3): (1, 1, 2),
    ("bf16", 0): (2 + 4, 4, 8),
    ("bf16", 1): (2 + 1, 2 + 1, 2),
    ("bf16", 2): (2 + 1, 1, 2),
    ("bf16", 3): (1, 1, 2),
}
WIDTHS = {"fp32": estimate.FP32, "bf16": estimate.BF16}


@pytest.mark.parametrize(("precision", "stage"), list(HELD))
def test_bytes_held_by_a_rank(precision: str, stage: int) -> None:
    held = estimate.state_bytes(stage, 1000, 4, WIDTHS[precision])
    parameters, gradients, optimizer = HELD[precision, stage]
    assert held == estimate.StateBytes(
        parameters=1000 * parameters, gradients=1000 * gradients, optimizer=1000 * optimizer
    )
    assert held.total == 1000 * (parameters + gradients + optimizer)


@pytest.mark.parametrize("precision", list(WIDTHS))
def test_plain_data_parallel_is_stage_0_at_any_number_of_ranks(precision: str) -> None:
    widths = WIDTHS[precision]
    plain = estimate.data_parallel_bytes(1001, widths)
    assert all(estimate.state_bytes(0, 1001, ranks, widths) == plain for ranks in (1, 2, 7))


def test_the_largest_rank_is_meant_where_parameters_do_not_divide() -> None:
    assert estimate.state_bytes(3, 10, 4).parameters == 3 * 4


# PAPERS: bytes per parameter with groups of 16 of 1024 ranks.
@pytest.mark.parametrize(
    ("stage", "per_parameter"),
    [("hpz", 0.140625), (3, 0.015625), ("mics", 1.0), ("hfsdp", 0.25 + 12 / 1024)],
)
def test_papers_in_nodes(stage: int | str, per_parameter: float) -> None:
    assert estimate.paper_state_bytes(stage, 1, 1024, node_size=16) == per_parameter
    # Which is what is held here, with fp32 gradients; "hfsdp" has them over all ranks.
    held = estimate.state_bytes(stage, 1 << 20, 1024, estimate.BF16, node_size=16)
    here = {"hfsdp": 2 / 16 + 16 / 1024}.get(str(stage), per_parameter)
    assert held.total == here * (1 << 20)


@pytest.mark.parametrize("stage", ["hpz", "hfsdp", "mics", "node/world/world"])
def test_one_node_has_no_other_cuts(stage: str) -> None:
    for node_size in (None, 8, 16):
        held = estimate.state_bytes(stage, 1000, 8, estimate.BF16, node_size=node_size)
        assert held == estimate.state_bytes(3, 1000, 8, estimate.BF16)
        sent = estimate.elements_in_hops(stage, 8, node_size=node_size)
        assert (sent.inside, sent.across) == (estimate.elements_sent(3, 8), 0)


# ZeRO paper, section 7: what one backward and step sends, relative to the parameters.
@pytest.mark.parametrize(
    ("stage", "gradients", "parameters"), [(0, 2, 0), (1, 1, 1), (2, 1, 1), (3, 1, 2)]
)
def test_paper_communication_volume(stage: int, gradients: int, parameters: int) -> None:
    messages = estimate.traffic(stage)
    assert messages.reduce == gradients
    assert messages.gather + messages.refresh == parameters
    assert sum(messages.by_kind().values()) == messages.total == gradients + parameters


@pytest.mark.parametrize("backwards", [1, 2, 5])
@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_elements_sent_with_several_backwards(backwards: int, world_size: int) -> None:
    k, share = backwards, Fraction(world_size - 1, world_size)
    stages = range(4)
    sent = [estimate.elements_sent(stage, world_size, k) for stage in stages]
    assert sent == [2 * k * share, (k + 1) * share, (k + 1) * share, 3 * k * share]
    unsynced = [estimate.elements_sent(stage, world_size, k, no_sync=True) for stage in stages]
    assert unsynced == [2 * share, 2 * share, 2 * share, (2 * k + 1) * share]


# What goes across nodes with k backwards, in multiples of (Y-1)/N: PAPERS has k + 1 for hpZ; with
# `no_sync` one reduce is left of k.
ACROSS = [
    (1, lambda k: k + 1, 2),
    (2, lambda k: k + 1, 2),
    (3, lambda k: 3 * k, lambda k: 2 * k + 1),
    ("hpz", lambda k: k + 1, 2),
    ("hfsdp", lambda k: 2, 2),
    ("mics", lambda k: 2, 2),
    ("whole/node/world", lambda k: 2, 2),
    ("whole/node/node", lambda k: 2, 2),
    ("whole/whole/node", lambda k: 2 * k, 2),
]


@pytest.mark.parametrize(("stage", "usual", "unsynced"), ACROSS)
@pytest.mark.parametrize("backwards", [1, 2, 5])
def test_elements_sent_in_nodes(
    stage: int | str, usual: object, unsynced: object, backwards: int
) -> None:
    """Inside they are those of the same stage in one node."""
    k, num_ranks, in_node = backwards, 12, 4
    for no_sync, count in ((False, usual), (True, unsynced)):
        times = count(k) if callable(count) else count
        found = estimate.elements_in_hops(stage, num_ranks, k, no_sync, node_size=in_node)
        assert found.across == times * Fraction(2, 12)
        alone = estimate.elements_sent(estimate.row_of(stage).on_one_node, in_node, k, no_sync)
        assert found.inside == alone


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_hops_send_as_much_in_all(stage: int) -> None:
    for num_ranks, in_node in ((8, 2), (12, 4), (64, 8), (4, 1)):
        found = estimate.elements_in_hops(stage, num_ranks, 3, node_size=in_node)
        assert found.total == estimate.elements_sent(stage, num_ranks, 3)


def test_bytes_sent_are_whole_for_padded_parameters() -> None:
    assert estimate.bytes_sent(3, 1200, 4, 2) == 3 * 1200 * 2 * 3 // 4
    assert estimate.bytes_sent(3, 1200, 1, 2) == 0


@pytest.mark.parametrize(
    ("call", "advice"),
    [
        (lambda: estimate.state_bytes(4, 10, 2), "choose 0"),
        (lambda: estimate.state_bytes(3, 10, 0), "at least 1"),
        (lambda: estimate.state_bytes(3, 0, 2), "with parameters"),
        (lambda: estimate.paper_state_bytes(-1, 10, 2), "choose 0"),
        (lambda: estimate.traffic(3, backwards=0), "at least one backward"),
        (lambda: estimate.elements_sent(3, 0), "at least 1"),
        (lambda: estimate.elements_sent("auto", 2), "choose 0"),
        (lambda: estimate.elements_sent("hbz", 2), "hpz"),
        (lambda: estimate.elements_sent("world/node/node", 2), "cut further"),
        (lambda: estimate.elements_in_hops(3, 5, node_size=2), "equal nodes"),
    ],
)
def test_bad_values_give_advice(call: object, advice: str) -> None:
    assert callable(call)
    with pytest.raises(ConfigError, match=advice):
        call()


NVME = Offload(optimizer="nvme", gradients="nvme", path="/x")


MOVED = [
    # Per element in bf16, with two backwards, at stages 0 to 2 and at stage 3.
    (Offload(), 0, 0),
    (Offload(optimizer="host", gradients="host"), 2 * 2 + 2, 2 * 2 + 2),
    (Offload(optimizer="host", gradients="host", parameters="host"), 2 * 2 + 2, 2 * 2 + 4 * 2),
    (Offload(optimizer="host"), 2 + 2, 2 + 2),
    (replace(NVME, gradients="device", parameters="nvme"), 2 + 2, 2 + 4 * 2),
    (Offload(gradients="host"), 2 * 2 + 4, 2 * 2 + 4),
    (Offload(parameters="host"), 0, 2 + 4 * 2),
]


@pytest.mark.parametrize(("offload", "kept", "released"), MOVED, ids=range(len(MOVED)))
def test_bytes_moved(offload: Offload, kept: int, released: int) -> None:
    """As docs/offload.md says; test_offload.py counts them."""
    found = [estimate.bytes_moved(stage, estimate.BF16, offload, 2) for stage in range(4)]
    assert found == [kept] * 3 + [released]


@pytest.mark.parametrize(
    ("offload", "backwards", "expected"),
    [
        # Adam in bf16: master and two moments both ways, the mean written and read.
        (NVME, 1, (16, 16)),
        (NVME, 3, (16 + 2 * 4, 16 + 2 * 4)),
        (replace(NVME, gradients="host"), 3, (12, 12)),
        (replace(NVME, gradients="device"), 3, (12, 12)),
        (replace(NVME, parameters="host"), 1, (16, 16)),
        # The value is written once, and read by two gathers a backward.
        (replace(NVME, parameters="nvme"), 1, (16 + 2 * 2, 16 + 2)),
        (replace(NVME, parameters="nvme"), 2, (20 + 4 * 2, 20 + 2)),
        (Offload(optimizer="host", gradients="host"), 1, (0, 0)),
        (None, 1, (0, 0)),
    ],
)
def test_what_moves_to_and_from_nvme(
    offload: Offload | None, backwards: int, expected: tuple[int, int]
) -> None:
    found = estimate.disk_traffic(3, estimate.BF16, offload, backwards)
    assert (found.read, found.written) == expected


def test_values_on_nvme_are_the_masters_in_full_precision() -> None:
    everything = replace(NVME, parameters="nvme")
    found = estimate.disk_traffic(3, estimate.FP32, everything)
    assert (found.read, found.written) == (16 + 2 * 4, 16)
    for widths, numbers in ((estimate.FP32, (4, 4, 8)), (estimate.BF16, (4 + 2, 4, 8))):
        states = estimate.tier_bytes("nvme", 3, 10, widths, everything)
        assert (states.parameters, states.gradients, states.optimizer) == tuple(
            10 * number for number in numbers
        )


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("widths", [estimate.FP32, estimate.BF16], ids=["fp32", "bf16"])
def test_tiers_add_up(stage: int, widths: estimate.ElementWidths) -> None:
    """Wherever states lie, nothing is lost, and nothing is counted twice."""
    for parameters in ("device", "host", "nvme") if stage == 3 else ("device",):
        for gradients in ("device", "host", "nvme"):
            offload = replace(NVME, parameters=parameters, gradients=gradients)
            found = estimate.owned_bytes(stage, 100, widths, offload)
            tiers = [
                estimate.tier_bytes(tier, stage, 100, widths, offload)
                for tier in ("device", "host", "nvme")
            ]
            assert found.total == sum(one.total for one in tiers)
            assert (found.device, found.host, found.nvme) == tuple(one.total for one in tiers)
