"""The fused loss head in Megatron's GPTModel against the stock one."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from covering import parametrize_covering
from distributed import run_megatron_ranks, run_megatron_ranks_once
from gpt import SEQ_LENGTH, VOCAB_SIZE, assert_equal_to_stock, gradients, tokens_of
from gpt_loss_head import FUSED, LAYOUTS, OFF, build, loss_and_gradients, loss_mask, run
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear
from witness import kept_storages

from tempo_megatron import TempoConfig
from tempo_megatron.slots.loss import (
    LossHead,
    TempoGPTModel,
    choose_loss,
    forward_output_layer,
    fused_gpt_class,
    tempoize_loss,
)


@parametrize_covering(
    layout=LAYOUTS, is_tied={"tied": True, "untied": False}, gives_loss_mask={"recomputed": False, "in forward": True}
)
def test_loss_and_every_gradient_equal_stock(layout, is_tied, gives_loss_mask):
    tp, sequence_parallel = layout
    arguments = (is_tied, sequence_parallel)
    found = run_megatron_ranks(loss_and_gradients, tp, tp, FUSED, *arguments, gives_loss_mask)
    stock = run_megatron_ranks_once(loss_and_gradients, tp, tp, OFF, *arguments, False)
    for ours, theirs in zip(found, stock, strict=True):
        assert_equal_to_stock(ours, theirs)


def last_stage_results(tempo_config, is_tied):
    model = build(tempo_config, is_tied=is_tied, pre_process=False, post_process=True)
    hidden = torch.randn(SEQ_LENGTH, 2, 32, generator=torch.Generator().manual_seed(3)).requires_grad_()
    model.set_input_tensor(hidden)
    losses = run(model)
    losses.sum().backward()
    return losses.sum().item(), {**gradients(model), "input": hidden.grad}


@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
def test_the_last_stage_of_a_pipeline_equals_stock(is_tied):
    (found,), (stock,) = (run_megatron_ranks(last_stage_results, 1, 1, c, is_tied) for c in (FUSED, OFF))
    assert_equal_to_stock(found, stock)


def other_stages_and_classes():
    class UsersModel(GPTModel):
        pass

    def is_fused(model):
        return isinstance(getattr(model.output_layer, "loss_head", None), LossHead)

    def first_stage(tempo_config, cls):
        return build(tempo_config, cls=cls, pre_process=True, post_process=False)

    users = build(FUSED, cls=UsersModel)
    again = build(FUSED)
    tempoize_loss(again, FUSED)
    constructed = build(OFF, cls=fused_gpt_class(UsersModel))
    tempoize_loss(constructed, FUSED)
    stock = build(OFF)
    return {
        "first stage": "_postprocess" not in vars(first_stage(FUSED, GPTModel)),
        "constructed first stage": torch.equal(run(first_stage(OFF, TempoGPTModel)), run(first_stage(OFF, GPTModel))),
        "off": not is_fused(stock) and not vars(stock).keys() & {"_postprocess", "compute_language_model_loss"},
        "classes": type(users) is UsersModel and type(users.output_layer) is ColumnParallelLinear,
        "user's": is_fused(users) and torch.equal(run(users), run(build(FUSED))),
        "twice": is_fused(again) and torch.equal(run(again), run(users)),
        "constructed": isinstance(constructed, UsersModel) and is_fused(constructed),
        "nothing is bound to what is constructed": "_postprocess" not in vars(constructed),
        "constructed's": torch.equal(run(constructed), run(users)),
        "name": (type(constructed).__name__, TempoGPTModel.__name__) == ("TempoUsersModel", "TempoGPTModel"),
        "one class": fused_gpt_class() is TempoGPTModel,
    }


def test_what_has_no_head_stays_and_a_users_class_is_kept():
    (found,) = run_megatron_ranks(other_stages_and_classes, 1, 1)
    assert all(found.values()), found


def copied():
    """Losses of a model and of its copy, after the copy alone has other weights."""
    # A model holds its groups, which nobody can copy.
    torch.distributed.ProcessGroup.__deepcopy__ = lambda self, memo: self
    found = {}
    for name, model in (("built", build(FUSED)), ("constructed", build(OFF, cls=TempoGPTModel))):
        other = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(1.5)
        stock = build(OFF)
        stock.load_state_dict(other.state_dict())
        losses = run(other)
        losses.sum().backward()
        found[name] = (
            (losses - run(stock)).abs().max().item() < 1e-5,
            (losses - run(model)).abs().max().item() > 1e-3,
            all(parameter.grad is None for parameter in model.parameters()),
        )
    return found


def test_a_copy_of_a_model_has_a_head_of_its_own():
    assert run_megatron_ranks(copied, 1, 1) == [dict.fromkeys(("built", "constructed"), (True, True, True))]


def hooks_and_modules():
    """What a built model holds before and after."""
    model = build(OFF, is_tied=False)
    calls = []
    model.output_layer.register_forward_hook(lambda module, inputs, output: calls.append(output[0].shape))
    model.register_load_state_dict_pre_hook(lambda module, *_: calls.append(type(module).__name__))

    def held():
        return (
            [(name, type(module), id(module)) for name, module in model.named_modules()],
            [(name, id(parameter)) for name, parameter in model.named_parameters()],
            list(model.state_dict()),
        )

    before = held()
    tempoize_loss(model, FUSED)
    after = held()
    run(model)
    model.load_state_dict(model.state_dict())
    return before == after, calls


def test_modules_parameters_classes_and_hooks_of_a_built_model_stay():
    expected = (True, [torch.Size([2, SEQ_LENGTH]), "GPTModel"])
    assert run_megatron_ranks(hooks_and_modules, 1, 1) == [expected]


def logits_of_both(tempo_config):
    model = build(tempo_config)
    model.train(False)
    tokens = tokens_of(0, 2)[:, :-1].contiguous()
    mask = torch.ones(1, 1, SEQ_LENGTH, SEQ_LENGTH, dtype=torch.bool).triu(1)
    positions = torch.arange(SEQ_LENGTH).expand(2, -1)
    with torch.no_grad():
        before = model(tokens, positions, mask)
        run(model)  # leaves nothing behind
        after = model(tokens, positions, mask, runtime_gather_output=True)
    return before, after


def test_without_labels_there_are_logits():
    found, stock = (run_megatron_ranks(logits_of_both, 2, 2, c) for c in (FUSED, OFF))
    for ours, theirs in zip(found, stock, strict=True):
        assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])
        assert ours[0].shape == (2, SEQ_LENGTH, VOCAB_SIZE // 2) and ours[1].shape == (2, SEQ_LENGTH, VOCAB_SIZE)


def keys(tempo_config):
    found = {}
    for is_tied in (True, False):
        model = build(tempo_config, is_tied=is_tied)
        found[is_tied] = (
            {name: None if value is None else tuple(value.shape) for name, value in model.state_dict().items()},
            sorted(getattr(value, "key", key) for key, value in model.sharded_state_dict().items()),
            [name for name, _ in model.named_parameters()],
        )
    return found


def test_checkpoint_keys_and_parameters_equal_megatrons():
    found, stock = (run_megatron_ranks(keys, 1, 1, c) for c in (FUSED, OFF))
    assert found == stock and any("output_layer.weight" in key for key in found[0][False][1])


def kept_largest(tempo_config):
    model = build(tempo_config)
    kept = kept_storages(lambda: run(model))
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    return max(size for pointer, size in kept.items() if pointer not in parameters), sum(kept.values())


def test_nothing_as_large_as_the_logits_is_kept():
    ((largest, everything),), ((stock_largest, stock_everything),) = (
        run_megatron_ranks(kept_largest, 1, 1, c) for c in (FUSED, OFF)
    )
    logits_bytes = 4 * 2 * SEQ_LENGTH * VOCAB_SIZE
    # In their place labels, and maximum and sum of each token.
    assert stock_everything - everything >= logits_bytes - 16 * 2 * SEQ_LENGTH
    assert largest <= stock_largest


def labels_outside_of_the_vocabulary():
    labels = tokens_of(0, 2)[:, 1:].clone()
    labels[0, 0], labels[0, 1], labels[1, 2] = -100, -1, VOCAB_SIZE
    losses = run(build(FUSED), labels)
    losses.sum().backward()
    return losses.detach()


def test_labels_outside_of_the_vocabulary_have_no_loss():
    for losses in run_megatron_ranks(labels_outside_of_the_vocabulary, 2, 2):
        assert (losses == 0).nonzero().tolist() == [[0, 0], [0, 1], [1, 2]]


def gradient_that_is_no_multiple_of_the_loss_mask():
    model = build(FUSED)
    try:
        (run(model, loss_mask=loss_mask()) * torch.rand(2, SEQ_LENGTH)).sum().backward()
    except RuntimeError as error:
        message = str(error)
    other = build(FUSED)
    (run(other, loss_mask=torch.zeros(2, SEQ_LENGTH)) * 0).sum().backward()
    return message, other.embedding.word_embeddings.weight.grad


def test_another_gradient_than_that_of_the_masked_sum_is_refused():
    ((message, of_nothing),) = run_megatron_ranks(gradient_that_is_no_multiple_of_the_loss_mask, 1, 1)
    assert "not a number times loss_mask" in message and "or call the model without loss_mask" in message
    assert not of_nothing.any()


def fused_weight_gradient(gives_loss_mask):
    """main_grad of a model whose output layer adds to it, and the gradient that it stands for."""
    found = []
    for is_fused in (True, False):
        model = build(FUSED, is_tied=False)
        weight = model.output_layer.weight
        if is_fused:
            model.output_layer.gradient_accumulation_fusion = True
            weight.main_grad, weight.grad_added_to_main_grad = torch.ones_like(weight), False
        run(model, **({"loss_mask": torch.ones(2, SEQ_LENGTH)} if gives_loss_mask else {})).sum().backward()
        found.append(weight.main_grad - 1 if is_fused else weight.grad)
        assert not is_fused or weight.grad_added_to_main_grad
    return found


@pytest.mark.parametrize("gives_loss_mask", [False, True])
def test_gradient_accumulation_fusion_adds_to_main_grad(gives_loss_mask):
    for main_grad, grad in run_megatron_ranks(fused_weight_gradient, 2, 2, gives_loss_mask):
        torch.testing.assert_close(main_grad, grad, rtol=1e-4, atol=1e-6)


def refusals():
    model = build(OFF)
    found, chosen = [], [choose_loss(model.decoder, TempoConfig()), choose_loss(model, OFF)]

    def try_it(model):
        try:
            tempoize_loss(model, FUSED)
        except ValueError as error:
            found.append(str(error))

    try_it(model.decoder)
    model.config.defer_embedding_wgrad_compute = True
    try_it(model)
    chosen.append(choose_loss(model, TempoConfig()))
    model.config.defer_embedding_wgrad_compute = False
    model.output_layer.__class__ = type("QuantizedLinear", (ColumnParallelLinear,), {})
    try_it(model)
    chosen.append(choose_loss(model, TempoConfig()))
    tempoize_loss(model, TempoConfig())
    return found, chosen, "_postprocess" not in vars(model)


def test_what_the_fused_head_cannot_do_is_refused_with_the_remedy():
    ((found, chosen, is_stock),) = run_megatron_ranks(refusals, 1, 1)
    reasons = ["the model is a TransformerBlock", "defer_embedding_wgrad", "is a QuantizedLinear"]
    assert len(found) == 3 and all(part in text for part, text in zip(reasons, found, strict=True))
    assert is_stock and all(text.endswith('; set tempo.loss to "off"') for text in found)
    # "auto" says the same and leaves the model as it is; what was written has no reason.
    assert chosen.pop(1) == ("off", None)
    assert [(choice, f'{reason}; set tempo.loss to "off"') for choice, reason in chosen] == [
        ("off", text) for text in found
    ]


def test_positional_signatures_equal_megatrons():
    def names(function):
        return list(inspect.signature(function).parameters)

    assert names(forward_output_layer)[1:] == names(ColumnParallelLinear.forward)[1:]
    assert names(TempoGPTModel.compute_language_model_loss) == names(GPTModel.compute_language_model_loss)
    ours, theirs = names(TempoGPTModel._postprocess), names(GPTModel._postprocess)
    assert ours[:5] == theirs[:5] and "loss_mask" in theirs
