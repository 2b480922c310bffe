import torch

from saccade.demo.exactness import compare, ratios_to_plain
from saccade.demo.model import ByteModel
from saccade.demo.settings import ModelShape


def findings():
    torch.manual_seed(0)
    model = ByteModel(ModelShape(32, 4, 2, 48, windows=(8, None), context=64)).eval()
    return list(compare(model.attention_calls(torch.arange(60)[None]), seed=0))


def test_every_layer_dtype_and_contender_is_compared():
    found = findings()
    assert len({(one.layer, one.dtype, one.who) for one in found}) == len(found) == 2 * 2 * 3


def test_errors_are_those_of_the_dtype():
    for one in findings():
        # In the first layer biases are large: gradients of keys grow with the queries, and heads
        # that see one byte only give its value as it is.
        low, high = (1e-9, 1e-3) if one.dtype == "float32" else (1e-6, 1.0)
        for error in (one.output, one.gradient):
            assert low < error.rms <= error.worst < high, one


def test_a_wrong_mask_would_be_seen():
    for one in findings():
        assert one.output.worst < 0.1, one
    assert set(ratios_to_plain(findings(), "float32")) == {"saccade", "PyTorch SDPA"}
