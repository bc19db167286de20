"""The PyTorch recorder sees every call under its path, and leaves no trace."""

import ml_dtypes
import numpy as np
import pytest

from flax_transformer import parity

torch = pytest.importorskip("torch")
nn = torch.nn


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.relu = nn.ReLU(inplace=True)
        self.weights = None

    def forward(self, x):
        self.weights = self.linear(x)  # a tensor with a history, as attention weights kept for plotting
        return self.relu(self.weights.clone()), None


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Inner()
        self.layers = nn.ModuleList([self.first, Inner()])
        self.layers[1].linear.weight = self.first.linear.weight
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("table", torch.arange(5.0))
        self.register_buffer("hidden", torch.arange(3), persistent=False)

    def forward(self, x):
        x = self.dropout(x + self.table)
        for layer in self.layers:
            x, _ = layer(x)
        return x


X = np.random.default_rng(7).standard_normal((3, 5))


@pytest.fixture(autouse=True)
def fused_path_is_on():
    torch.backends.mha.set_fastpath_enabled(True)
    yield
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net()


def test_every_call_is_recorded_in_order_under_path_number_and_place(net):
    recording = parity.record_torch(net, X)
    assert list(recording.activations) == [
        "dropout#0",
        "first.linear#0",
        "first.relu#0",
        "first#0/0",
        "layers.1.linear#0",
        "layers.1.relu#0",
        "layers.1#0/0",
        "#0",
    ]
    net.eval()
    wanted = net.first.linear.double()(torch.from_numpy(X) + torch.arange(5.0)).detach().numpy()
    np.testing.assert_array_equal(recording.activations["first.linear#0"], wanted)
    np.testing.assert_array_equal(recording.activations["first.relu#0"], np.maximum(wanted, 0))
    np.testing.assert_array_equal(recording.outputs[""], recording.activations["#0"])


def test_a_later_operation_in_place_does_not_change_what_was_recorded():
    recording = parity.record_torch(nn.Sequential(nn.Linear(5, 7), nn.ReLU(inplace=True)), X)
    assert recording.activations["0#0"].min() < 0 <= recording.activations["1#0"].min()


def test_calls_of_one_module_are_numbered(net):
    recording = parity.record_torch(net, X, call=lambda model, x: model.first(model.first(x)[0]))
    assert [key for key in recording.activations if key.startswith("first#")] == ["first#0/0", "first#1/0"]


def test_shared_modules_and_tied_parameters_appear_once_with_all_their_names(net):
    recording = parity.record_torch(net, X)
    assert recording.module_names["first.linear"] == ("first.linear", "layers.0.linear")
    assert "layers.0" not in recording.module_names
    assert recording.module_names["first"] == ("first", "layers.0")
    tied = ("first.linear.weight", "layers.0.linear.weight", "layers.1.linear.weight")
    assert recording.tensor_names["first.linear.weight"] == tied
    assert list(recording.parameters) == ["first.linear.weight", "first.linear.bias", "layers.1.linear.bias"]
    assert list(recording.buffers) == ["table", "hidden"]
    assert recording.buffers["hidden"].dtype == np.int64


def test_the_module_is_left_as_it_was_even_if_a_forward_pass_left_tensors_in_it(net):
    net(torch.randn(3, 5))
    state = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    parity.record_torch(net, X)
    assert net.training
    assert not any(module._forward_hooks for module in net.modules())
    for name, tensor in net.state_dict().items():
        assert tensor.dtype == state[name].dtype
        assert torch.equal(tensor, state[name])


def test_the_fused_attention_path_does_not_replace_the_arithmetic_or_hide_submodules(monkeypatch):
    monkeypatch.setattr(torch, "_native_multi_head_attention", None)
    layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
    recording = parity.record_torch(layer, np.random.default_rng(0).standard_normal((3, 5, 8)))
    assert {"self_attn#0/0", "linear1#0", "norm2#0"} <= recording.activations.keys()


def test_the_fused_path_is_switched_on_again_when_the_model_raises(net):
    with pytest.raises(RuntimeError):
        parity.record_torch(net, X[:, :3])
    assert torch.backends.mha.get_fastpath_enabled()


def test_bfloat16_is_recorded_as_bfloat16_and_survives_the_disk(net, tmp_path):
    recording = parity.record_torch(net, X, dtype="bfloat16")
    assert recording.activations["first.linear#0"].dtype == ml_dtypes.bfloat16
    recording.save(tmp_path)
    loaded = parity.load(tmp_path)
    for key, array in recording.activations.items():
        assert array.tobytes() == loaded.activations[key].tobytes()


def test_integers_of_any_width_and_keywords_are_taken():
    embedding = nn.Embedding(7, 3)
    ids = np.random.default_rng(0).integers(0, 7, (3, 5), dtype=np.uint8)
    recording = parity.record_torch(embedding, {"input": ids})
    np.testing.assert_array_equal(recording.outputs[""], embedding.weight.detach().numpy()[ids])
