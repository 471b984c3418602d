import pytest

from oomwatch.errors import UsageError
from oomwatch.memory.data.cards import CARDS
from oomwatch.memory.devices import find_device
from oomwatch.units import GIB


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100 80GB PCIe", "a100-80gb"),
        ("A100 80GB", "a100-80gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 3090 Ti", "rtx-3090"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("NVIDIA H100 NVL", "h100-nvl-94gb"),
        ("NVIDIA H20-3e", "h20-141gb"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA A10", "a10"),
        ("Tesla V100-SXM2-32GB", "v100-32gb"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000"),
        ("NVIDIA GB200", "gb200"),
        ("AMD Instinct MI300X", "mi300x"),
        ("AMD Radeon 8060S Graphics", "strix-halo"),
        ("NVIDIA Jetson AGX Orin Developer Kit", "jetson-orin-64gb"),
        ("NVIDIA GH200 480GB", "gh200-96gb"),
        ("NVIDIA H200 NVL", "h200-141gb"),
        ("rtx_4090", "rtx-4090"),
        ("L40S 48GB", "l40s"),
        ("a100", "a100-40gb"),
    ],
)
def test_names_of_the_driver_and_of_people_find_the_card(name, short):
    assert find_device(name).name == short


def test_every_short_name_finds_itself():
    assert [find_device(c.short).name for c in CARDS] == [c.short for c in CARDS]


def test_total_is_what_cuda_says_not_the_marketing_size():
    assert find_device("h100-80gb").total_bytes == int(79.18 * GIB)
    assert find_device("t4").total_bytes < 15 * GIB


def test_a_mig_slice_is_a_share_of_its_card():
    slice_ = find_device("NVIDIA H100 80GB HBM3 MIG 3g.40gb")
    assert slice_.total_bytes == find_device("h100").total_bytes // 2
    assert not slice_.measured


@pytest.mark.parametrize(
    "name", ["gtx 1080", "", "NVIDIA GeForce RTX 4090 Laptop GPU", "H100 MIG 9g.999gb"]
)
def test_an_unknown_card_is_said_so(name):
    with pytest.raises(UsageError, match="--gpu-total-gib"):
        find_device(name)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("h1000", "h100-80gb"),  # a digit too many
        ("a1000", "a100-80gb"),
        ("l400", "l40"),
        ("NVIDIA RTX A1000", "rtx-a5000"),  # a smaller card, not the A100 its name begins with
        ("A100X", "a100-80gb"),  # a word more
        ("4090 Ti", "rtx-4090"),
        ("GRID A100-40C", "a100-40gb"),  # a slice of the card
        ("A100 60GB", "a100-80gb"),  # a size that the card is not sold with
        ("h100-94gb", "h100-nvl-94gb"),
        ("rtx 4090 48gb", "rtx-4090"),
        ("h10", "a10"),  # a digit short
    ],
)
def test_a_mistyped_card_is_asked_about_and_never_taken_for_another(name, meant):
    with pytest.raises(UsageError, match=f"did you mean .*{meant}"):
        find_device(name)


def test_a100_has_the_batches_of_small_cards():
    assert not find_device("a100-80gb").is_large
    assert find_device("h100-80gb").is_large
    assert not find_device("l40s").is_large
