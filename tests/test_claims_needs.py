"""Needs against facts: which GPUs meet them, and the one-line reason when none do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from pytest_gpuguard.claims.architectures import SM_ARCHITECTURES
from pytest_gpuguard.claims.errors import ClaimError
from pytest_gpuguard.claims.markers import needs_arch, needs_gpus, needs_package, needs_sm, needs_sm120, needs_sm121
from pytest_gpuguard.claims.needs import Needs, Unmet, check_needs, count_sms, select_gpus, vram_needs
from pytest_gpuguard.facts.gpu import Gpu, GpuMemory, Rig, arch_of
from pytest_gpuguard.names import NOT_REQUIRABLE, REQUIRABLE
from tests.laws import given, st

MIB = 1 << 20
RTX_PRO_6000, H100, L40S = 97887 * MIB, 81559 * MIB, 46068 * MIB


@dataclass(frozen=True)
class Stack:
    """A stack with these packages."""

    torch_cuda: str | None = None
    packages: Mapping[str, str] = field(default_factory=dict)

    def package(self, name: str) -> str | None:
        return self.packages.get(name)


def rig(*sms: str, total: int | None = RTX_PRO_6000, driver: str | None = "580.105.08") -> Rig:
    """A rig with one GPU per SM number, called g0, g1 … in PCI order."""
    return Rig(tuple(gpu(index, sm, total) for index, sm in enumerate(sms)), driver=driver)


def gpu(index: int, sm: str = "120", total: int | None = RTX_PRO_6000, fault: str | None = None) -> Gpu:
    return Gpu(index, f"g{index}", "a card", f"bus{index}", sm=sm, memory=GpuMemory(total=total), fault=fault)


def unmet(needs: Needs, on: Rig | None, stack: Stack | None = None) -> list[str]:
    return [one.text for one in check_needs(needs, on, stack, arch_of)]


def taken(needs: Needs, count: int, on: Rig) -> tuple[str, ...]:
    return select_gpus(needs, count, on, arch_of).uuids


def picked(needs: Needs, count: int, on: Rig, *busy: str) -> tuple[str, ...] | None:
    choice = select_gpus(needs, count, on, arch_of).choice
    return choice.pick([uuid for uuid in choice.uuids if uuid not in busy], count)


# ----------------------------------------------------------------------------------------------------- SM families


def test_the_reason_names_both_families_and_the_count() -> None:
    (reason,) = check_needs(needs_sm120.build(), rig(*["90"] * 8), None, arch_of)
    assert reason == Unmet("sm", "needs SM120, this rig has 8× SM90")


@pytest.mark.parametrize(
    ("asked", "has"), [("120", "121"), ("121", "120"), ("120", "100"), ("80", "90"), ("90", "100")]
)
def test_no_family_takes_another_not_even_a_newer_one(asked: str, has: str) -> None:
    assert unmet(needs_sm.build(asked), rig(has)) == [f"needs SM{asked}, this rig has 1× SM{has}"]


@given(st.sampled_from(list(SM_ARCHITECTURES)), st.sampled_from(list(SM_ARCHITECTURES)))
def test_a_family_is_met_by_itself_alone(asked: str, has: str) -> None:
    assert (unmet(needs_sm.build(asked), rig(has)) == []) is (asked == has)


def test_alternatives_are_named_together() -> None:
    needs = needs_sm.build("120", "121")
    assert unmet(needs, rig("121")) == []
    assert unmet(needs, rig("90", "90")) == ["needs SM120 or SM121, this rig has 2× SM90"]


def test_a_mixed_rig_is_counted_by_family_and_gives_the_right_cards() -> None:
    mixed = rig("90", "120", "90", "120", "90")
    assert taken(needs_sm120.build(), 2, mixed) == ("g1", "g3")
    assert unmet(needs_sm121.build(), mixed) == ["needs SM121, this rig has 3× SM90 and 2× SM120"]


def test_an_architecture_takes_all_of_its_families() -> None:
    needs = needs_arch.build("blackwell")
    assert unmet(needs, rig("120")) == unmet(needs, rig("100")) == []
    assert check_needs(needs, rig("90"), None, arch_of) == (Unmet("arch", "needs blackwell, this rig has 1× SM90"),)


# ------------------------------------------------------------------------------------------------ counts and memory


def test_too_few_gpus_of_the_right_kind_are_counted_after_the_kind() -> None:
    needs = needs_sm120.build().merge(needs_gpus.build(4))
    (reason,) = check_needs(needs, rig("120", "120", "90", "90", "90"), None, arch_of)
    assert reason == Unmet("gpus", "needs 4 GPUs of SM120, this rig has 2")


def test_a_layout_may_ask_for_more_gpus_than_the_needs() -> None:
    (reason,) = select_gpus(Needs(), 4, rig("120", "120"), arch_of).unmet
    assert reason.text == "needs 4 GPUs, this rig has 2"


@pytest.mark.parametrize(
    ("needs", "text"),
    [
        (needs_sm120.build(), "needs SM120, this rig has no GPUs"),
        (needs_arch.build("hopper"), "needs hopper, this rig has no GPUs"),
        (needs_gpus.build(1), "needs a GPU, this rig has no GPUs"),
        (needs_gpus.build(1, vram="96GB"), "needs a GPU with 96GB, this rig has no GPUs"),
        (needs_gpus.build(8, vram="96GB"), "needs 8 GPUs with 96GB, this rig has no GPUs"),
        (needs_sm120.build().merge(needs_gpus.build(8)), "needs 8 GPUs of SM120, this rig has no GPUs"),
    ],
)
@pytest.mark.parametrize("on", [None, Rig()], ids=["no rig", "empty rig"])
def test_without_gpus_the_reason_says_what_was_wanted(needs: Needs, text: str, on: Rig | None) -> None:
    assert check_needs(needs, on, None, arch_of) == (Unmet("gpus", text),)


def test_a_gpu_with_a_fault_is_not_counted() -> None:
    broken = Rig((gpu(0), gpu(1, fault="GPU is lost"), gpu(2)))
    assert taken(Needs(), 2, broken) == ("g0", "g2")
    assert unmet(needs_gpus.build(3), broken) == ["needs 3 GPUs, this rig has 2"]
    assert unmet(needs_gpus.build(1), Rig((gpu(0, fault="GPU is lost"),))) == ["needs a GPU, this rig has no GPUs"]


@pytest.mark.parametrize(
    ("vram", "total", "met"),
    [
        ("96GB", RTX_PRO_6000, True),
        ("80GB", H100, True),
        ("48GB", L40S, True),
        ("96GB", H100, False),
        ("80GB", L40S, False),
        ("80GiB", H100, False),
        ("79.6GiB", H100, True),
        ("96GiB", RTX_PRO_6000, False),
        ("48GiB", L40S, False),
        ("24GB", None, False),
    ],
)
def test_gb_is_what_cards_are_sold_as_and_gib_is_exact(vram: str, total: int | None, met: bool) -> None:
    assert (unmet(needs_gpus.build(1, vram=vram), rig("90", total=total)) == []) is met


@pytest.mark.parametrize(
    ("vram", "total", "text"),
    [
        ("96GB", H100, "needs 2× 96GB, this rig has 3× 85.5 GB"),
        ("80GiB", H100, "needs 2× 80GiB, this rig has 3× 79.6 GiB"),
        ("24GB", None, "needs 2× 24GB, this rig has 3× unknown memory"),
    ],
)
def test_the_memory_that_is_there_is_told_in_the_unit_that_was_asked_for(
    vram: str, total: int | None, text: str
) -> None:
    found = check_needs(needs_gpus.build(2, vram=vram), rig("90", "90", "90", total=total), None, arch_of)
    assert found == (Unmet("vram", text),)


def test_memory_counts_only_the_cards_that_have_it() -> None:
    mixed = Rig((gpu(0, "90", H100), gpu(1, "90", 143771 * MIB), gpu(2, "90", 143771 * MIB)))
    assert taken(needs_gpus.build(2, vram="140GB"), 2, mixed) == ("g1", "g2")
    assert unmet(needs_gpus.build(3, vram="140GB"), mixed) == ["needs 3× 140GB, this rig has 3× 150.8 GB / 85.5 GB"]


# ----------------------------------------------------------------------------------------------------------- links


def linked(nvlink: Sequence[tuple[int, int]] = (), pix: Sequence[tuple[int, int]] = ()) -> Rig:
    """Four GPUs, joined as told; every other pair is PXB apart."""
    gpus = tuple(gpu(index) for index in range(4))
    pairs = [(a.uuid, b.uuid) for a in gpus for b in gpus if a is not b]
    near = {(f"g{a}", f"g{b}") for x, y in pix for a, b in ((x, y), (y, x))}
    return Rig(
        gpus,
        topology={pair: "PIX" if pair in near else "PXB" for pair in pairs},
        nvlink={(f"g{a}", f"g{b}"): 18 for x, y in nvlink for a, b in ((x, y), (y, x))},
    )


@pytest.mark.parametrize(
    ("link", "on", "uuids"),  # of all GPUs that are in such a pair
    [
        ("nvlink", linked(nvlink=[(1, 3)]), ("g1", "g3")),
        ("nvlink", linked(pix=[(0, 1)]), None),
        ("nvlink", linked(nvlink=[(0, 2), (1, 3)]), ("g0", "g1", "g2", "g3")),
        ("pcie", linked(nvlink=[(0, 1), (0, 2), (0, 3)]), ("g1", "g2", "g3")),
        ("pcie", linked(nvlink=[(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]), None),
        ("pix", linked(pix=[(2, 3)]), ("g2", "g3")),
        ("pix", linked(nvlink=[(0, 1)]), None),
        (None, linked(), ("g0", "g1", "g2", "g3")),
    ],
)
def test_a_link_leaves_every_gpu_that_is_in_a_pair_that_has_it(
    link: str | None, on: Rig, uuids: tuple[str, ...] | None
) -> None:
    found = select_gpus(needs_gpus.build(2, link=link), 2, on, arch_of)
    if uuids is None:
        assert found.unmet == (Unmet("link", f"needs 2 GPUs joined by {link}, this rig has none such"),)
    else:
        assert found.uuids == uuids


def test_a_busy_pair_does_not_keep_a_claim_from_another_pair_that_has_the_link() -> None:
    needs, on = needs_gpus.build(2, link="nvlink"), linked(nvlink=[(0, 2), (1, 3)])
    assert picked(needs, 2, on) == ("g0", "g2")
    assert picked(needs, 2, on, "g2") == ("g1", "g3")
    assert picked(needs, 2, on, "g2", "g3") is None, "g0 and g1 are free, and not joined"


def test_gpus_that_no_whole_group_holds_are_no_candidates_for_it() -> None:
    both = linked(pix=[(0, 1), (1, 2), (0, 2), (2, 3)])
    assert taken(needs_gpus.build(2, link="pix"), 2, both) == ("g0", "g1", "g2", "g3")
    assert taken(needs_gpus.build(3, link="pix"), 3, both) == ("g0", "g1", "g2")


def test_every_pair_of_a_group_must_be_joined() -> None:
    chain = linked(pix=[(0, 1), (1, 2)])
    assert unmet(needs_gpus.build(3, link="pix"), chain) == ["needs 3 GPUs joined by pix, this rig has none such"]
    assert taken(needs_gpus.build(3, link="pix"), 3, linked(pix=[(1, 2), (1, 3), (2, 3)])) == ("g1", "g2", "g3")


def test_two_gpus_on_one_board_are_nearer_than_one_switch() -> None:
    board = Rig((gpu(0), gpu(1)), topology={("g0", "g1"): "INTERNAL", ("g1", "g0"): "INTERNAL"})
    assert taken(needs_gpus.build(2, link="pix"), 2, board) == ("g0", "g1")


def test_a_single_gpu_with_nvlink_has_a_partner() -> None:
    assert taken(needs_gpus.build(1, link="nvlink"), 1, linked(nvlink=[(2, 3)])) == ("g2", "g3")
    assert unmet(needs_gpus.build(1, link="nvlink"), linked()) == [
        "needs a GPU joined by nvlink, this rig has none such"
    ]


# -------------------------------------------------------------------------------------------------------- versions


@pytest.mark.parametrize(
    ("subject", "name", "spec", "has", "text"),
    [
        ("driver", "driver", ">=580", "575.57.08", "needs driver >=580, this rig has 575.57.08"),
        ("driver", "driver", ">=580", None, "needs driver >=580, this rig has no NVIDIA driver"),
        ("cuda", "cuda", ">=13", "12.9", "needs CUDA >=13, this stack's torch has CUDA 12.9"),
        ("cuda", "cuda", ">=13", None, "needs CUDA >=13, this stack's torch has no CUDA"),
        ("package", "flashinfer-python", ">=0.6.9", "0.6.1", "needs flashinfer-python >=0.6.9, this stack has 0.6.1"),
        ("package", "flashinfer-python", ">=0.6.9", None, "needs flashinfer-python >=0.6.9, this stack has none"),
        ("package", "flashinfer-python", "", None, "needs flashinfer-python, this stack has none"),
    ],
)
def test_a_version_that_does_not_do_is_told_with_what_is_there(
    subject: str, name: str, spec: str, has: str | None, text: str
) -> None:
    on = rig("120", driver=has if subject == "driver" else None)
    stack = Stack(has if subject == "cuda" else None, {name: has} if subject == "package" and has else {})
    assert check_needs(Needs(versions=((subject, name, spec),)), on, stack, arch_of) == (Unmet(subject, text),)


def test_versions_that_do_are_no_reason() -> None:
    needs = Needs(versions=(("driver", "driver", ">=580"), ("cuda", "cuda", ">=13"), ("package", "sglang", ">=0.5.15")))
    assert unmet(needs, rig("120"), Stack("13.0", {"sglang": "0.5.15.dev1"})) == []
    assert unmet(needs_package.build("sglang"), None, Stack(None, {"sglang": "anything"})) == []


def test_without_rig_and_stack_every_version_is_missing() -> None:
    needs = Needs(versions=(("driver", "driver", ">=580"), ("cuda", "cuda", ">=13"), ("package", "sglang", "")))
    assert [one.kind for one in check_needs(needs, None, None, arch_of)] == ["driver", "cuda", "package"]


def test_gpus_are_named_before_versions() -> None:
    needs = needs_sm120.build().merge(needs_package.build("sglang"))
    assert [one.kind for one in check_needs(needs, rig("90"), Stack(), arch_of)] == ["sm", "package"]


def test_no_needs_are_met_anywhere() -> None:
    assert unmet(Needs(), None, None) == []


def test_every_reason_is_either_requirable_or_not() -> None:
    assert not set(REQUIRABLE) & set(NOT_REQUIRABLE)
    assert {"gpus", "driver", "cuda", "package"} <= set(REQUIRABLE)
    assert {"sm", "arch", "vram", "link"} <= set(NOT_REQUIRABLE)


# --------------------------------------------------------------------------------------------------------- merging


def test_merged_needs_ask_for_all_of_both() -> None:
    merged = Needs(gpus=2, link="pcie", sms=("120", "121")).merge(Needs(gpus=8, exclusive=True, sms=("121", "90")))
    assert merged == Needs(gpus=8, link="pcie", exclusive=True, sms=("121",))


def test_the_larger_memory_wins_with_its_own_words() -> None:
    small, large = vram_needs("80GB"), vram_needs("96GB")
    assert small.merge(large) == large.merge(small) == Needs(vram_text="96GB", vram_bytes=96 * 10**9)


def test_versions_of_both_are_kept_once() -> None:
    one, other = needs_package.build("sglang>=0.5"), needs_package.build("sglang<0.6")
    assert one.merge(other).merge(one).versions == (("package", "sglang", ">=0.5"), ("package", "sglang", "<0.6"))


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        (
            Needs(sms=("120",)),
            Needs(sms=("90",)),
            'needs SM120 and needs SM90: no GPU is both; write needs_sm("…", "…") for either',
        ),
        (Needs(archs=("hopper",)), Needs(archs=("blackwell",)), "needs hopper and needs blackwell: no GPU is both"),
        (Needs(sms=("120", "121")), Needs(archs=("hopper",)), "needs SM120 or SM121 and needs hopper: no GPU is both"),
        (Needs(link="pcie"), Needs(link="nvlink"), "needs link='pcie' and link='nvlink': name one"),
    ],
)
def test_needs_that_no_gpu_can_meet_are_refused(first: Needs, second: Needs, said: str) -> None:
    with pytest.raises(ClaimError) as refusal:
        first.merge(second)
    assert str(refusal.value) == said


def test_a_family_and_its_own_architecture_merge() -> None:
    assert needs_sm120.build().merge(needs_arch.build("blackwell")) == Needs(sms=("120",), archs=("blackwell",))


@pytest.mark.parametrize(
    ("needs", "any_gpu"),
    [
        (Needs(), False),
        (needs_package.build("sglang"), False),
        (needs_sm120.build(), True),
        (needs_arch.build("ada"), True),
        (needs_gpus.build(1), True),
        (Needs(link="pcie"), True),
        (vram_needs("24GB"), True),
    ],
)
def test_only_needs_about_gpus_need_a_gpu(needs: Needs, any_gpu: bool) -> None:
    assert needs.any_gpu is any_gpu


def test_cards_whose_sm_nobody_said_are_told_so() -> None:
    from types import SimpleNamespace

    gpus: Any = [SimpleNamespace(sm=""), SimpleNamespace(sm=""), SimpleNamespace(sm="90")]
    assert count_sms(gpus) == "2× unknown SM and 1× SM90"
