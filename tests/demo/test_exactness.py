import torch

from saccade.demo.exactness import compare, ratios_to_plain
from saccade.demo.model import LOOKING_BACK, ByteModel
from saccade.demo.settings import DemoModelShape


def findings():
    torch.manual_seed(0)
    model = ByteModel(DemoModelShape(32, 4, 2, 48, windows=(8, None), context=64)).eval()
    return list(compare(model.attention_calls(torch.arange(60)[None]), seed=0))


def test_every_layer_dtype_and_contender_is_compared():
    found = findings()
    assert len({(one.layer, one.dtype, one.who) for one in found}) == len(found) == 2 * 2 * 3 + 4
    capped = {one.who for one in found if "softcap" in one.layer}
    assert capped == {"saccade", "plain PyTorch"}  # SDPA has no softcap


def test_errors_are_those_of_the_dtype():
    """Of outputs; gradients of keys are sums of queries, which the first layer's biases make
    LOOKING_BACK times larger."""
    for one in findings():
        largest = 1e-4 if one.dtype == "float32" else 1e-1
        assert 1e-9 < one.output.rms <= one.output.worst < largest, one
        assert 1e-9 < one.gradient.rms <= one.gradient.worst < largest * LOOKING_BACK, one


def test_a_wrong_mask_would_be_seen():
    for one in findings():
        assert one.output.worst < 0.1, one
    assert set(ratios_to_plain(findings(), "float32")) == {"saccade", "PyTorch SDPA"}
