"""The fused loss head in Megatron's GPTModel and BertModel against the stock one, and errors that come late."""

from __future__ import annotations

import copy
import inspect
import itertools
from types import SimpleNamespace

import pytest
import torch
from distributed import run_megatron_ranks
from gpt import SEQ_LENGTH, VOCAB_SIZE, assert_equal_to_stock, differentiate, gpt_config, gradients
from gpt_loss_head import FUSED, HAS_MUP, MUP, OFF, ModelWithMuP, build, inputs, run
from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
from megatron.core.models.bert.bert_model import BertModel
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear
from torch.nn import functional as F
from witness import kept_storages

from tempo_kernels.late_check import LateCheck
from tempo_megatron import TempoConfig
from tempo_megatron.memory.fake_tensors import use_fake_tensors
from tempo_megatron.slots.loss import (
    IS_MULTIPLE,
    LossesOfTotal,
    LossHead,
    TempoBertModel,
    TempoGPTModel,
    choose_loss,
    forward_output_layer,
    fused_gpt_class,
    tempoize_loss,
)

AUTO = TempoConfig()
ONE_RANK = pytest.mark.usefixtures("one_rank")


def loss_mask():
    mask = torch.ones(2, SEQ_LENGTH)
    mask[0, :5] = 0
    mask[1] *= 0.25
    return mask


def train_gpt(tempo_config, gives_loss_mask, **settings):
    model = build(tempo_config, **settings)
    found = run(model, **({"loss_mask": loss_mask()} if gives_loss_mask else {}))
    assert found.dtype == torch.float32 and found.shape == (2, SEQ_LENGTH) and found.is_contiguous()
    loss = (found * loss_mask()).sum() / loss_mask().sum()
    (128.0 * loss).backward()
    return loss.item(), gradients(model)


def build_bert(tempo_config, is_tied=True, cls=BertModel):
    torch.manual_seed(7)
    settings = {"share_embeddings_and_output_weights": is_tied}
    model = cls(gpt_config(), 2, bert_layer_local_spec, VOCAB_SIZE, SEQ_LENGTH, **settings)
    tempoize_loss(model, tempo_config)
    with torch.no_grad():  # Megatron begins with a bias of 0, which tells nothing
        model.output_layer.bias.normal_()
    return model.train()


def masked():
    """One token in six, and of the second sample fewer."""
    mask = torch.zeros(2, SEQ_LENGTH)
    mask[0, ::6] = mask[1, ::9] = 1
    return mask


def run_bert(model, labels=None, **keywords):
    padding = torch.ones(2, SEQ_LENGTH)
    padding[1, 10:] = 0
    segments = (torch.arange(SEQ_LENGTH) > 6).long().expand(2, -1)
    return model(inputs()[0], padding, segments, labels, **keywords)


def train_bert(tempo_config, gives_loss_mask, *, is_tied, is_constructed=False):
    model = build_bert(*((OFF, is_tied, TempoBertModel) if is_constructed else (tempo_config, is_tied)))
    losses, order = run_bert(model, inputs()[-1], **({"loss_mask": masked()} if gives_loss_mask else {}))
    assert losses.dtype == torch.float32 and losses.shape == (2, SEQ_LENGTH)
    loss = (losses * masked()).sum() / masked().sum() + F.cross_entropy(order.float(), torch.tensor([0, 1]))
    return differentiate(model, loss)


def train_all(tp):
    """Case -> stock and ours: every way to be tied, and to be given a loss mask."""
    # Of a model whose logits are scaled.
    scaled = MUP if HAS_MUP else {"cls": ModelWithMuP}
    kinds = {"GPT": (train_gpt, {}), "scaled": (train_gpt, scaled), "BERT": (train_bert, {})}
    if tp == 2:
        kinds["SP"] = (train_gpt, {"sequence_parallel": True})
    found = {}
    for (name, (train, settings)), is_tied in itertools.product(kinds.items(), (True, False)):
        stock = train(OFF, False, is_tied=is_tied, **settings)
        ways = [{}, {"is_constructed": True}] if name == "BERT" else [{}]
        for gives_loss_mask, more in itertools.product((False, True), ways):
            ours = train(FUSED, gives_loss_mask, is_tied=is_tied, **settings, **more)
            found[name, is_tied, gives_loss_mask, bool(more)] = stock, ours
    return found


@pytest.mark.parametrize("tp", [1, 2])
def test_loss_and_every_gradient_equal_stock(tp):
    for found in run_megatron_ranks(train_all, tp, tp, tp):
        for stock, ours in found.values():
            assert_equal_to_stock(ours, stock)
        plain, scaled = (found[name, True, False, False][0][0] for name in ("GPT", "scaled"))
        assert plain != pytest.approx(scaled, rel=1e-4)


@ONE_RANK
@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
def test_the_last_stage_of_a_pipeline_equals_stock(is_tied):
    found = []
    for tempo_config in (FUSED, OFF):
        model = build(tempo_config, is_tied=is_tied, pre_process=False, post_process=True)
        hidden = torch.randn(SEQ_LENGTH, 2, 32, generator=torch.Generator().manual_seed(3)).requires_grad_()
        model.set_input_tensor(hidden)
        loss, found_gradients = differentiate(model, run(model).sum())
        found.append((loss, {**found_gradients, "input": hidden.grad}))
    assert_equal_to_stock(*found)


def is_fused(model):
    return isinstance(getattr(model.output_layer, "loss_head", None), LossHead)


@ONE_RANK
def test_what_has_no_head_stays_and_a_users_class_is_kept():
    class UsersModel(GPTModel):
        pass

    first = [build(c, cls=cls, pre_process=True, post_process=False) for c, cls in ((FUSED, GPTModel), (OFF, GPTModel))]
    assert "_postprocess" not in vars(first[0])
    made = build(OFF, cls=TempoGPTModel, pre_process=True, post_process=False)
    assert torch.equal(run(made), run(first[1]))
    stock = build(OFF)
    assert not is_fused(stock) and not vars(stock).keys() & {"_postprocess", "compute_language_model_loss"}
    users, again, constructed = build(FUSED, cls=UsersModel), build(FUSED), build(OFF, cls=fused_gpt_class(UsersModel))
    for model in (again, constructed):
        tempoize_loss(model, FUSED)
    assert type(users) is UsersModel and type(users.output_layer) is ColumnParallelLinear
    assert isinstance(constructed, UsersModel)
    losses = run(build(FUSED))
    for model in (users, again, constructed):
        assert is_fused(model) and torch.equal(run(model), losses)
    assert (type(constructed).__name__, TempoGPTModel.__name__) == ("TempoUsersModel", "TempoGPTModel")
    assert fused_gpt_class() is TempoGPTModel


@ONE_RANK
def test_a_copy_of_a_model_has_a_head_of_its_own(monkeypatch):
    # A model holds its groups, which nobody can copy.
    monkeypatch.setattr(torch.distributed.ProcessGroup, "__deepcopy__", lambda self, memo: self, raising=False)
    for model in (build(FUSED), build(OFF, cls=TempoGPTModel)):
        other = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(1.5)
        stock = build(OFF)
        stock.load_state_dict(other.state_dict())
        losses = run(other)
        losses.sum().backward()
        assert (losses - run(stock)).abs().max() < 1e-5 and (losses - run(model)).abs().max() > 1e-3
        assert all(parameter.grad is None for parameter in model.parameters())


@ONE_RANK
def test_modules_parameters_classes_hooks_and_keys_of_a_built_model_stay():
    for is_tied in (True, False):
        model = build(OFF, is_tied=is_tied)
        calls = []
        model.output_layer.register_forward_hook(lambda module, inputs, output, calls=calls: calls.append(output[0]))
        model.register_load_state_dict_pre_hook(lambda module, *_, calls=calls: calls.append(type(module)))

        def held(model=model):
            return (
                [(name, type(module), id(module)) for name, module in model.named_modules()],
                [(name, id(parameter)) for name, parameter in model.named_parameters()],
                list(model.state_dict()),
                sorted(getattr(value, "key", key) for key, value in model.sharded_state_dict().items()),
            )

        before = held()
        tempoize_loss(model, FUSED)
        assert held() == before and is_fused(model)
        assert any("output_layer.weight" in key for key in before[-1]) or is_tied
        assert calls == []
        run(model)
        model.load_state_dict(model.state_dict())
        assert [getattr(call, "shape", call) for call in calls] == [(2, SEQ_LENGTH), GPTModel]


def logits_and_losses_outside():
    *given, labels = inputs()
    found = []
    for tempo_config in (OFF, FUSED):
        model = build(tempo_config).eval()
        with torch.no_grad():
            before = model(*given)
            run(model)  # leaves nothing behind
            found.append((before, model(*given, runtime_gather_output=True)))
    labels[0, 0], labels[0, 1], labels[1, 2] = -100, -1, VOCAB_SIZE
    losses = run(build(FUSED), labels=labels)
    losses.sum().backward()
    return *found, losses.detach()


def test_without_labels_there_are_logits_and_labels_outside_of_the_vocabulary_have_no_loss():
    for stock, ours, losses in run_megatron_ranks(logits_and_losses_outside, 2, 2):
        assert torch.equal(ours[0], stock[0]) and torch.equal(ours[1], stock[1])
        assert ours[0].shape == (2, SEQ_LENGTH, VOCAB_SIZE // 2) and ours[1].shape == (2, SEQ_LENGTH, VOCAB_SIZE)
        assert (losses == 0).nonzero().tolist() == [[0, 0], [0, 1], [1, 2]]


@ONE_RANK
def test_nothing_as_large_as_the_logits_is_kept():
    found = []
    for tempo_config in (OFF, FUSED):
        model = build(tempo_config)
        kept = kept_storages(lambda model=model: run(model))
        parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
        found.append((max(size for pointer, size in kept.items() if pointer not in parameters), sum(kept.values())))
    (stock_largest, stock_everything), (largest, everything) = found
    # In their place labels, and maximum and sum of each token.
    assert stock_everything - everything >= 4 * 2 * SEQ_LENGTH * VOCAB_SIZE - 16 * 2 * SEQ_LENGTH
    assert largest <= stock_largest
    stock, ours = build_bert(OFF), build_bert(FUSED)
    kept = kept_storages(lambda: run_bert(ours, inputs()[-1], loss_mask=masked())[0])
    assert sum(kept.values()) < sum(kept_storages(lambda: run_bert(stock, inputs()[-1])[0]).values())
    assert torch.equal(run_bert(ours.eval())[0], run_bert(stock.eval())[0])
    assert sorted(ours.state_dict()) == sorted(stock.state_dict())
    assert choose_loss(build_bert(OFF), AUTO) == ("fused", None)


@ONE_RANK
def test_another_gradient_than_that_of_the_masked_sum_is_refused():
    with pytest.raises(RuntimeError, match="not a number times loss_mask.* or call the model without loss_mask"):
        (run(build(FUSED), loss_mask=loss_mask()) * torch.rand(2, SEQ_LENGTH)).sum().backward()
    model = build(FUSED)
    (run(model, loss_mask=torch.zeros(2, SEQ_LENGTH)) * 0).sum().backward()
    assert not model.embedding.word_embeddings.weight.grad.any()


def weight_gradients():
    """main_grad of a model whose output layer adds to it, and the gradient that it stands for."""
    found = []
    for gives_loss_mask, is_fused in itertools.product((False, True), (True, False)):
        model = build(FUSED, is_tied=False)
        weight = model.output_layer.weight
        if is_fused:
            model.output_layer.gradient_accumulation_fusion = True
            weight.main_grad, weight.grad_added_to_main_grad = torch.ones_like(weight), False
        run(model, **({"loss_mask": torch.ones(2, SEQ_LENGTH)} if gives_loss_mask else {})).sum().backward()
        found.append(weight.main_grad - 1 if is_fused else weight.grad)
        assert not is_fused or weight.grad_added_to_main_grad
    return found


def test_gradient_accumulation_fusion_adds_to_main_grad():
    for found in run_megatron_ranks(weight_gradients, 2, 2):
        for main_grad, grad in zip(found[::2], found[1::2], strict=True):
            torch.testing.assert_close(main_grad, grad, rtol=1e-4, atol=1e-6)


@ONE_RANK
def test_a_model_on_tensors_without_memory_has_its_scale_too():
    model = build(OFF, cls=ModelWithMuP)
    with use_fake_tensors():
        tempoize_loss(model, FUSED)
    assert model.output_layer.loss_head.logits_scale == 0.3


class ModelWithProcessor(GPTModel):
    """What GPTModel is since megatron-core 0.18, for those before."""

    def _postprocess(self, hidden_states, input_ids, position_ids, labels, *args, output_processor=None, **kwargs):
        if output_processor is None:
            return super()._postprocess(hidden_states, input_ids, position_ids, labels, *args, **kwargs)
        weight = self.shared_embedding_or_output_weight()
        return output_processor(
            hidden_states=hidden_states, output_layer=self.output_layer, output_weight=weight, labels=labels
        )


@ONE_RANK
def test_an_output_processor_gets_logits():
    has_processor = "output_processor" in inspect.signature(GPTModel._postprocess).parameters
    hidden, labels = torch.randn(SEQ_LENGTH, 2, 32), inputs()[-1]

    def processor(*, hidden_states, output_layer, output_weight, **_):
        return output_layer(hidden_states, weight=output_weight)[0]

    ours, stock = (build(c, cls=GPTModel if has_processor else ModelWithProcessor) for c in (FUSED, OFF))
    logits, stock_logits = (
        model._postprocess(hidden, None, None, labels, None, None, None, output_processor=processor)
        for model in (ours, stock)
    )
    assert logits.shape == (SEQ_LENGTH, 2, VOCAB_SIZE) and torch.equal(logits, stock_logits)
    torch.testing.assert_close(run(ours), run(stock))


class ModelWithLossOfItsOwn(GPTModel):
    def compute_language_model_loss(self, labels, logits):
        return super().compute_language_model_loss(labels, logits) + 1e-4 * logits.logsumexp(-1).square().t()


def change(model, **attributes):
    for name, value in attributes.items():
        setattr(model, name, value)
    return model


def defer_gradients(model):
    change(model.config, defer_embedding_wgrad_compute=True)
    return model


def quantize(model):
    model.output_layer.__class__ = type("QuantizedLinear", (ColumnParallelLinear,), {})
    return model


# What makes a model that cannot have the head, and why it cannot.
UNFIT = {
    "a block": (lambda: build(OFF).decoder, "the model is a TransformerBlock"),
    "deferred": (lambda: defer_gradients(build(OFF)), "defer_embedding_wgrad"),
    "quantized": (lambda: quantize(build(OFF)), "the output layer is a QuantizedLinear"),
    "class": (
        lambda: build(OFF, cls=ModelWithLossOfItsOwn),
        "ModelWithLossOfItsOwn has a compute_language_model_loss of its own, which needs logits",
    ),
    "method": (
        lambda: change(build(OFF), compute_language_model_loss=lambda labels, logits: logits.sum()),
        "GPTModel has a compute_language_model_loss of its own, which needs logits",
    ),
    "bent logits": (lambda: change(build(OFF), _scale_logits=torch.tanh), "GPTModel does more to its logits"),
}


@ONE_RANK
@pytest.mark.parametrize("name", UNFIT)
def test_what_the_fused_head_cannot_do_is_refused_with_the_remedy_and_auto_leaves_it_as_it_is(name):
    make, reason = UNFIT[name]
    model = make()
    with pytest.raises(ValueError, match=f'{reason}.*; set tempo.loss to "off"$') as refused:
        tempoize_loss(model, FUSED)
    choice, why = choose_loss(model, AUTO)
    assert choice == "off" and f'{why}; set tempo.loss to "off"' == str(refused.value)
    tempoize_loss(model, AUTO)
    assert "_postprocess" not in vars(model)
    assert choose_loss(model, OFF) == ("off", None)


@ONE_RANK
def test_a_class_with_a_loss_of_its_own_cannot_be_constructed_with_the_head():
    with pytest.raises(ValueError, match="of its own, which needs logits; set tempo.loss to"):
        build(OFF, cls=fused_gpt_class(ModelWithLossOfItsOwn))


@ONE_RANK
def test_positional_signatures_equal_megatrons():
    def names(function):
        return list(inspect.signature(function).parameters)

    gpt, bert = build(OFF, cls=TempoGPTModel), build_bert(FUSED)
    assert names(forward_output_layer)[1:] == names(ColumnParallelLinear.forward)[1:]
    assert names(gpt.compute_language_model_loss) == names(GPTModel.compute_language_model_loss)[1:]
    assert names(bert.forward) == [*names(BertModel.forward)[1:], "loss_mask"]


class Flag(torch.Tensor):
    """A flag on a device of which this machine has none."""

    device = torch.device("cuda")


def on_gpu(value):
    return torch.tensor(value).as_subclass(Flag)


@pytest.fixture
def arrived(monkeypatch):
    """Whether each copy that was started is there by now."""
    there = []

    def record(index):
        there.append(False)
        return SimpleNamespace(record=lambda stream: None, query=lambda: there[index])

    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *sizes, pin_memory=False, **given: empty(*sizes, **given))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda: record(len(there)))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return there


def test_a_flag_of_a_gpu_is_told_when_it_has_arrived_and_once(arrived, monkeypatch):
    check = LateCheck("it is wrong; mend it")
    check.note(on_gpu(False))
    check.note(on_gpu(True))
    check.raise_if_noted()  # neither is there
    arrived[0] = True
    check.raise_if_noted()  # what was right is let go
    arrived[1] = True
    with pytest.raises(RuntimeError, match="it is wrong; mend it"):
        check.raise_if_noted()
    check.raise_if_noted()
    # Inside of a capture nothing is started.
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    check.note(on_gpu(True))
    assert len(arrived) == 2


def test_a_watched_flag_is_told_once_and_asks_no_gpu_where_it_lies_on_a_cpu(monkeypatch):
    # benchmarks/fake_gpu.py makes a CPU's tensors say so, on machines without a driver.
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: pytest.fail("there is no GPU"))
    check, flag = LateCheck("it is wrong"), torch.ones((), dtype=torch.int32)
    with pytest.raises(RuntimeError, match="it is wrong"):
        check.watch(flag)
    check.watch(flag)  # it was set to 0


@ONE_RANK
def test_on_a_cpu_it_is_told_at_once_and_the_fused_loss_tells_it_when_the_model_is_next_called(arrived):
    check, model = LateCheck("it is wrong"), build(FUSED)
    check.note(torch.tensor(False))
    with pytest.raises(RuntimeError, match="it is wrong"):
        check.note(torch.tensor(True))
    IS_MULTIPLE.note(on_gpu(True))
    run(model)  # it is not there
    arrived[0] = True
    with pytest.raises(RuntimeError, match="not a number times loss_mask"):
        run(model)
    run(model)


@pytest.mark.gpu
def test_on_a_gpu_a_wrong_gradient_is_nan_and_the_next_forward_says_why():
    losses, weights = (torch.rand(2, 8, device="cuda") for _ in range(2))
    total = (losses * weights).sum().requires_grad_()
    (LossesOfTotal.apply(total, losses, weights) * weights).sum().backward()
    torch.cuda.synchronize()
    IS_MULTIPLE.raise_if_noted()
    (LossesOfTotal.apply(total, losses, weights) * losses).sum().backward()
    assert total.grad.isnan()
    with pytest.raises(RuntimeError, match="not a number times loss_mask"):
        IS_MULTIPLE.raise_if_noted()
    IS_MULTIPLE.raise_if_noted()
