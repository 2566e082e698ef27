"""tempoize: the same model, parameters and results, and fewer bytes kept for backward."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
from covering import parametrize_covering
from torch import nn
from torch_models import B, H, S, build, kept_bytes, loss_and_gradients, make_ids
from witness import assert_all_within_rule

from tempo_torch import report_on, restore, tempoize

NORMS = {
    "LayerNorm": lambda: nn.LayerNorm(H),
    "LayerNorm without bias": lambda: nn.LayerNorm(H, bias=False),
    "RMSNorm": lambda: nn.RMSNorm(H, eps=1e-6),
    "RMSNorm without eps": lambda: nn.RMSNorm(H),
}
ACTIVATIONS = {"gelu": nn.GELU, "gelu tanh": lambda: nn.GELU(approximate="tanh"), "silu": nn.SiLU, "mish": nn.Mish}


@parametrize_covering(each={"norm": NORMS, "activation": ACTIVATIONS})
def test_without_dropout_loss_and_gradients_are_stocks(norm, activation):
    kwargs = {"p": 0.0, "norm": norm, "activation": activation}
    stock, ours, exact = build(**kwargs), tempoize(build(**kwargs)), build(**kwargs).double()
    found = (loss_and_gradients(model, make_ids()) for model in (ours, stock, exact))
    assert_all_within_rule("loss", *found)


class Gate(nn.Module):
    """x silu(x), a product that a linear which drops its input makes again."""

    def __init__(self):
        super().__init__()
        self.act = nn.SiLU()

    def forward(self, x):
        return self.act(x) * x


AGAIN = "was written to in place after .* made it"
CHANGED = "has been modified by an inplace operation"
WRITTEN = {
    "gelu": (nn.GELU, {}, AGAIN),
    "gelu in place": (nn.GELU, {"activation": "inplace"}, CHANGED),
    "silu": (nn.SiLU, {}, AGAIN),
    "dropout": (lambda: nn.Sequential(nn.GELU(), nn.Dropout(0.5)), {}, AGAIN),
    "LayerNorm": (NORMS["LayerNorm"], {"norm": "recompute"}, AGAIN),
    "LayerNorm in place": (NORMS["LayerNorm"], {"norm": "inplace"}, CHANGED),
    "product": (Gate, {}, None),
}


@pytest.mark.parametrize(("make", "choices", "refusal"), WRITTEN.values(), ids=WRITTEN)
def test_a_hook_that_writes_to_an_output_unseen_by_the_graph_is_refused_or_changes_no_gradient(make, choices, refusal):
    def write(module, arguments, y):
        with torch.no_grad():
            y[..., :8] = 3.0

    def differentiate(model):
        model[1].register_forward_hook(write)
        model(torch.ones(4, H)).square().sum().backward()
        return [p.grad for p in model.parameters()]

    stock = nn.Sequential(nn.Linear(H, H), make(), nn.Linear(H, H))
    ours = tempoize(copy.deepcopy(stock), **choices)
    expected = differentiate(stock)
    if refusal is None:
        torch.testing.assert_close(differentiate(ours), expected)
    else:
        with pytest.raises((ValueError, RuntimeError), match=refusal):
            differentiate(ours)


@pytest.mark.parametrize("is_converted_later", [False, True])
def test_an_rms_norm_without_eps_takes_that_of_its_inputs_dtype(is_converted_later):
    x = torch.linspace(-1e-4, 2e-4, 3 * H, dtype=torch.float64).view(3, H)
    stock = nn.RMSNorm(H).double()
    ours = tempoize(nn.Sequential(nn.RMSNorm(H)) if is_converted_later else nn.Sequential(nn.RMSNorm(H).double()))
    torch.testing.assert_close(ours.double()(x), stock(x), rtol=1e-12, atol=0)


def test_the_model_its_parameters_and_its_keys_are_the_same():
    model = build()
    before, parameters = dict(model.state_dict()), list(model.parameters())
    assert tempoize(model) is model
    assert list(model.state_dict()) == list(before)
    assert all(ours is theirs for ours, theirs in zip(model.parameters(), parameters, strict=True))
    build().load_state_dict(model.state_dict(), strict=True)
    # What sorts parameters by the class of their module sees the same classes.
    assert isinstance(model.norm, nn.LayerNorm) and isinstance(model.head, nn.Linear)


@pytest.mark.parametrize("norm", ["inplace", "recompute"])
@pytest.mark.parametrize("activation", ["inplace", "recompute"])
def test_a_layer_keeps_what_its_linears_need(norm, activation):
    ids = make_ids()
    model = tempoize(build(activation=nn.GELU).bfloat16(), norm=norm, activation=activation)
    kept = kept_bytes(model, lambda: model(ids), "layers.1") / (B * S * H)
    # Norm 2, softmax 2, norm 2, GELU 8: in place, and the linear's own input 8 behind a dropout, and a bit each.
    expected = 14.0 if activation == "recompute" else 14.0 + 8.0 + 0.5
    small = (2 * 4 + (4 if norm == "recompute" else 0) * 2) / H + 2 * 2 * 4 / (B * S)
    assert expected <= kept <= expected + small


def test_the_report_says_what_was_replaced_left_and_why():
    model = nn.Sequential(nn.LayerNorm((4, H)), nn.LayerNorm(H, elementwise_affine=False), nn.LayerNorm(H))
    model.extend([nn.ELU(), nn.GELU(), nn.Dropout2d(0.1), nn.Dropout(0.1, inplace=True), nn.Dropout(0.1), nn.ReLU()])
    report = report_on(tempoize(model, attention="off", loss="off"))
    assert [entry.name for entry in report.replaced] == ["2", "4", "7"]
    assert {entry.name: entry.why for entry in report.left} == {
        "0": "it normalises over several dimensions",
        "1": "it has no weight",
        "3": "Tempo has gelu, gelu_tanh, mish, quick_gelu, silu, squared_relu only",
        "5": "it drops channels, or changes more than it drops",
        "6": "it writes in place, or its class derives from nn.Dropout",
    }
    assert "1 x  left      norm        LayerNorm  it has no weight" in str(report)
    assert str(report_on(tempoize(nn.Identity(), attention="off", loss="off"))) == (
        "nothing to replace\n"
        "What a forward in training runs is not known yet: its inputs are not; the first one tells.\n"
        "not checked: it has no parameters; check(model, **batch) does it on a batch"
    )


@pytest.mark.parametrize(("num_lost", "value"), [(0, "inplace"), (2, "inplace"), (3, "recompute")])
def test_a_norm_with_more_lost_channels_than_it_has_room_for_is_recomputed(num_lost, value):
    norm = torch.nn.LayerNorm(128)
    with torch.no_grad():
        norm.weight[:num_lost] = 0.0
    report = report_on(tempoize(torch.nn.Sequential(norm, torch.nn.Linear(128, 8)), seed=1))
    assert [entry.now for entry in report.replaced if entry.operation == "norm"] == [value]


def test_off_leaves_everything_as_it_was():
    model = tempoize(build(), activation="off", norm="off", dropout="off", attention="off", loss="off")
    assert not report_on(model).entries
    assert type(model.norm) is nn.LayerNorm and type(model.drop) is nn.Dropout


def test_evaluation_is_bit_for_bit_stocks_without_norms():
    stock, ours = build().eval(), tempoize(build(), norm="off").eval()
    with torch.no_grad():
        assert torch.equal(stock(make_ids()), ours(make_ids()))


def test_autocast_has_the_dtypes_of_stock():
    for norm in NORMS.values():
        seen = []
        for model in (build(p=0.0, norm=norm), tempoize(build(p=0.0, norm=norm))):
            outs = []
            for module in model.modules():
                module.register_forward_hook(lambda *args, outs=outs: outs.append(args[2].dtype))
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(make_ids()).float().sum()
            loss.backward()
            seen.append((outs, [parameter.grad.dtype for parameter in model.parameters()]))
        assert seen[0] == seen[1]


# Values of another kind than the arguments are of.
NUMBERS = ("1", 1.5, True, -1)
KINDS = {"offload_ahead": (*NUMBERS, None), "sequence_ranks": (*NUMBERS, None)}
KINDS |= {"offload": (None, 1.5, True, -1), "seed": ("1", None, 1.5, True), "mlp": (1.5, None), "loss": (True, [1])}


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: tempoize("gpt2"), "model is str; expected a torch.nn.Module; build the model first"),
        (lambda: tempoize(build(), norm="in-place"), 'norm is \'in-place\'; expected one of "auto", "inplace"'),
        (lambda: tempoize(build(), attention="flash"), 'attention is "flash", but the model has no registry'),
        (lambda: tempoize(nn.Identity(), norm="inplace"), 'norm is "inplace", but the model has no module for it'),
        (lambda: tempoize(build(activation=nn.ELU), activation="inplace"), 'activation is "inplace", but Tempo has'),
        (lambda: tempoize(tempoize(build()), seed=2), "Model was given to tempoize before, with other arguments"),
        (lambda: restore(build()), "Model was not given to tempoize; expected a model that was"),
        (lambda: tempoize(build(), rank=2, num_ranks=2), "rank is 2 and num_ranks 2; expected both"),
        (lambda: report_on(build()), "Model was not given to tempoize; expected a model that was"),
        *(
            (lambda name=name, value=value: tempoize(build(), **{name: value}), f"{name} is {value!r}; expected")
            for name, values in KINDS.items()
            for value in values
        ),
        *((lambda v=v: tempoize(build(), rank=v), f"rank is {v!r} and num_ranks None; expected") for v in NUMBERS),
        *((lambda v=v: tempoize(build(), num_ranks=v), f"rank is None and num_ranks {v!r}; expected") for v in NUMBERS),
    ],
)
def test_bad_input_is_one_sentence(call, sentence):
    with pytest.raises(ValueError) as raised:
        call()
    assert str(raised.value).startswith(sentence) and "\n" not in str(raised.value)


def read_hooks(model):
    return [(len(each._forward_pre_hooks), len(each._forward_hooks)) for each in model.modules()]


def test_restore_undoes_tempoize():
    model, stock = build(), build()
    classes, attributes = ([f(each) for each in model.modules()] for f in (type, lambda each: set(each.__dict__)))
    parameters = list(model.parameters())
    loss_and_gradients(tempoize(model, norm="recompute"), make_ids())
    assert restore(model) is model
    assert [type(each) for each in model.modules()] == classes and read_hooks(model) == read_hooks(stock)
    assert [set(each.__dict__) for each in model.modules()] == attributes
    assert all(ours is theirs for ours, theirs in zip(model.parameters(), parameters, strict=True))
    found = []
    for each in (model, stock):
        torch.manual_seed(3)
        found.append(loss_and_gradients(each, make_ids()))
    assert all(map(torch.equal, *found))
    # And it can be given to tempoize once more, with other arguments; a copy too.
    assert report_on(tempoize(model, seed=9)).replaced
    assert read_hooks(restore(copy.deepcopy(model))) == read_hooks(stock)


def test_tempoize_again_changes_nothing_and_takes_what_is_new():
    once, twice = (tempoize(build(), seed=5) for _ in range(2))
    tempoize(tempoize(twice, seed=5), seed=5)
    assert read_hooks(once) == read_hooks(twice) and report_on(once) == report_on(twice)
    for _ in range(2):
        assert all(map(torch.equal, loss_and_gradients(once, make_ids()), loss_and_gradients(twice, make_ids())))
    # The model goes into another one, which has a dropout of its own.
    outer = tempoize(nn.Sequential(twice, nn.Dropout(0.5), nn.Linear(50, 50)), seed=5)
    assert {"0.layers.0.drop1", "1"} <= {entry.name for entry in report_on(outer).replaced}
    out = outer(make_ids())
    assert out.shape == (B, S, 50)
    out.sum().backward()


def test_torch_alone_is_enough():
    code = (
        "import sys, torch, tempo_torch; m = tempo_torch.tempoize(torch.nn.Sequential(torch.nn.LayerNorm(4), "
        "torch.nn.Linear(4, 4), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.Linear(4, 4))); "
        "m(torch.ones(2, 4)).sum().backward(); "
        "print(*({'transformers', 'peft', 'deepspeed', 'megatron'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr
