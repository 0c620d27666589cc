"""One micro-batch: against a plain reference, through accumulation, and without any anchor."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from slipstream.config import TrainingConfig
from slipstream.drafter.anchors import Blocks, sample_blocks
from slipstream.drafter.attention import build_attention
from slipstream.drafter.config import DrafterConfig
from slipstream.drafter.model import DraftModel
from slipstream.errors import TrainingError
from slipstream.records import FeatureBatch, PackedBatch, StepResult
from slipstream.training.optimizer import Updater, build_optimizer
from slipstream.training.step import anchor_generator, resolve_step_settings, training_step

ROWS, TOKENS, ANCHORS, BLOCK, HIDDEN, VOCAB = 2, 40, 6, 5, 16, 50
CONFIG = DrafterConfig(
    layers=2,
    block_size=BLOCK,
    target_layer_ids=(1, 3),
    mask_token_id=49,
    num_target_layers=6,
    hidden_size=HIDDEN,
    intermediate_size=24,
    heads=2,
    kv_heads=1,
    head_dim=8,
    vocab_size=VOCAB,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    max_position_embeddings=128,
    layer_types=("full_attention", "full_attention"),
)
EMBEDDING = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(1))
HEAD = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(2))


def own_logits(states: torch.Tensor) -> torch.Tensor:
    """Stands for a target that caps its logits."""
    return 3.0 * torch.tanh(F.linear(states, HEAD) / 3.0)


def features(index: int = 0, supervised: bool = True) -> FeatureBatch:
    g = torch.Generator().manual_seed(100 + index)
    documents = torch.zeros(ROWS, TOKENS, dtype=torch.long)
    documents[:, 22:] = 1
    documents[:, 36:] = -1
    positions = torch.arange(TOKENS).expand(ROWS, TOKENS).clone()
    positions[:, 22:] -= 22
    positions[:, 36:] = 0
    mask = (torch.rand(ROWS, TOKENS, generator=g) > 0.2) & (documents >= 0) & supervised
    batch = PackedBatch(
        index=index,
        ids=torch.randint(VOCAB - 1, (ROWS, TOKENS), generator=g),
        loss_mask=mask,
        document_ids=documents,
        positions=positions,
    )
    return FeatureBatch(
        batch=batch,
        features=torch.randn(ROWS, TOKENS, 2 * HIDDEN, generator=g),
        final_states=torch.randn(ROWS, TOKENS, HIDDEN, generator=g),
    )


def draw(found: FeatureBatch, number: int = 0, short_share: float = 0.0) -> Blocks:
    return sample_blocks(
        found.batch,
        anchors=ANCHORS,
        block_size=BLOCK,
        mask_token_id=CONFIG.mask_token_id,
        generator=anchor_generator(0, found.batch.index, number),
        short_share=short_share,
    )


def run(
    net: DraftModel, found: FeatureBatch, blocks: Blocks, embedding: torch.Tensor = EMBEDDING, **changes: object
) -> StepResult:
    training = TrainingConfig(**changes)  # type: ignore[arg-type]
    precision = torch.bfloat16 if training.precision == "bfloat16" else torch.float32
    settings = resolve_step_settings(training, block_size=BLOCK, vocab_rows=VOCAB, precision=precision)
    attention = build_attention("dense", CONFIG, ROWS, TOKENS, ANCHORS, "cpu")
    attention.update(blocks.anchors, blocks.document_start, blocks.keep, blocks.length)
    return training_step(
        net,
        lambda ids: F.embedding(ids, embedding),
        HEAD,
        found,
        blocks,
        attention,
        settings=settings,
        head=own_logits if training.labels == "soft" else None,
    )


def reference(
    net: DraftModel, found: FeatureBatch, blocks: Blocks, gamma: float, share: float
) -> tuple[torch.Tensor, float, int]:
    """Loop over blocks: each alone, with its own context only. Returns loss sum, weight sum, accepted.

    ``share``: of the target's distribution in a label.
    """
    loss, weight, accepted = torch.zeros(()), 0.0, 0
    for row in range(ROWS):
        for n in range(ANCHORS):
            if not blocks.keep[row, n]:
                continue
            anchor, start = int(blocks.anchors[row, n]), int(blocks.document_start[row, n])
            context = found.features[row : row + 1, start:anchor]
            places = found.batch.positions[row : row + 1, start:anchor]
            slots = BLOCK if blocks.length is None else int(blocks.length[row, n])
            noise = F.embedding(blocks.noise_ids[row, n, :slots][None], EMBEDDING)
            hidden = net.draft(noise, blocks.positions[row, n, :slots][None], net.context_kv(context, places))
            logits = hidden[0, 1:] @ HEAD.T
            leading = True
            for k in range(1, slots):
                at = anchor + k
                same = at < TOKENS and int(found.batch.document_ids[row, at]) == int(
                    found.batch.document_ids[row, anchor]
                )
                if not same or not bool(found.batch.loss_mask[row, at]):
                    break
                w = float(torch.exp(torch.tensor(-(k - 1) / gamma)))
                label = (1 - share) * F.one_hot(found.batch.ids[row, at], VOCAB)
                if share:  # the target predicts a token one place before it
                    assert found.final_states is not None
                    label = label + share * torch.softmax(own_logits(found.final_states[row, at - 1]), -1)
                loss = loss + w * F.cross_entropy(logits[k - 1][None], label[None])
                weight += w
                leading = leading and int(logits[k - 1].argmax()) == int(found.batch.ids[row, at])
                accepted += leading and slots == BLOCK
    return loss, weight, accepted


@pytest.mark.parametrize("short", [0.0, 0.7])
@pytest.mark.parametrize("share", [0.0, 1.0, 0.4])
def test_step_equals_a_loop_over_single_blocks_values_and_gradients(share: float, short: float):
    """A short block is one that is drafted in fewer slots."""
    net, found = DraftModel(CONFIG), features()
    net.init_weights(0.3, torch.Generator().manual_seed(3))
    blocks = draw(found, short_share=short)
    labels = {"labels": "soft", "soft_share": share} if share else {}
    result = run(net, found, blocks, gamma=3.0, **labels)
    result.loss_sum.backward()
    grads = {n: p.grad.clone() for n, p in net.named_parameters()}
    net.zero_grad()
    loss, weight, accepted = reference(net, found, blocks, 3.0, share)
    loss.backward()
    torch.testing.assert_close(result.loss_sum.detach(), loss.detach(), rtol=1e-4, atol=1e-3)
    assert float(result.weight_sum) == pytest.approx(weight, rel=1e-5)
    assert int(result.accepted) == accepted
    whole = blocks.keep if blocks.length is None else blocks.keep & (blocks.length == BLOCK)
    assert 0 < int(result.blocks) == int(whole.sum())
    for name, p in net.named_parameters():
        torch.testing.assert_close(grads[name], p.grad, rtol=1e-3, atol=1e-3)


def test_soft_labels_leave_what_is_counted_as_it_is():
    net, found = DraftModel(CONFIG), features()
    blocks = draw(found)
    hard, soft = run(net, found, blocks), run(net, found, blocks, labels="soft")
    assert torch.equal(hard.hard_sum, hard.loss_sum.detach())
    for name in ("weight_sum", "blocks", "accepted", "correct_by_slot", "valid_by_slot", "hard_sum"):
        assert torch.equal(getattr(hard, name), getattr(soft, name)), name
    assert not torch.equal(hard.loss_sum, soft.loss_sum)


def test_soft_labels_need_the_final_states():
    net, found = DraftModel(CONFIG), features()
    bare = FeatureBatch(batch=found.batch, features=found.features)
    run(net, bare, draw(found))
    with pytest.raises(TrainingError, match="soft labels need the target's final states"):
        run(net, bare, draw(found), labels="soft")


def test_accepted_counts_only_leading_right_slots():
    net, found = DraftModel(CONFIG), features()
    blocks = draw(found)
    result = run(net, found, blocks)
    assert int(result.correct_by_slot[0]) >= int(result.accepted) - int(result.correct_by_slot[1:].sum())
    assert result.correct_by_slot.shape == result.valid_by_slot.shape == (BLOCK - 1,)
    assert torch.equal(result.valid_by_slot, blocks.valid.sum((0, 1)))


@pytest.mark.parametrize("loss", ["decay", "dpace"])
def test_accumulation_of_batches_and_draws_is_the_gradient_of_all_at_once(loss: str):
    """Three uneven micro-batches, one without anchors, two draws each: the gradient is sum / sum, no mean of means."""
    parts = [features(0), features(1, supervised=False), features(2)]
    parts[2].batch.loss_mask[:, 8:] = False  # few anchors here: a mean of means would weigh them too much
    pairs = [(f, draw(f, d)) for f in parts for d in range(2)]
    settings = TrainingConfig(clip_norm=1e9, learning_rate=0.1)
    net, whole = DraftModel(CONFIG), DraftModel(CONFIG)
    whole.load_state_dict(net.state_dict())
    updater = Updater(build_optimizer(net, settings), clip_norm=1e9)
    total, weight = torch.zeros(()), torch.zeros(())
    for found, blocks in pairs:
        result = run(net, found, blocks, loss=loss)
        result.loss_sum.backward()
        total, weight = total + result.loss_sum.detach(), weight + result.weight_sum
    norm = updater.apply(step=0, factor=1.0, loss_sum=total, weight_sum=weight)
    results = [run(whole, found, blocks, loss=loss) for found, blocks in pairs]
    joint = torch.stack([r.loss_sum for r in results]).sum() / torch.stack([r.weight_sum for r in results]).sum()
    joint.backward()
    expected = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in whole.parameters()]))
    torch.testing.assert_close(norm, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("labels", ["hard", "soft"])
def test_a_batch_without_anchors_is_zero_and_finite(labels: str):
    net, found = DraftModel(CONFIG), features(supervised=False)
    result = run(net, found, draw(found), labels=labels)
    result.loss_sum.backward()
    assert (
        float(result.loss_sum.detach()) == float(result.weight_sum) == int(result.blocks) == int(result.accepted) == 0
    )
    assert all(p.grad is not None and not p.grad.any() for p in net.parameters())


def test_bfloat16_computes_lower_but_keeps_weights_and_gradients_float32():
    net, found = DraftModel(CONFIG), features()
    blocks = draw(found)
    low, full = run(net, found, blocks, precision="bfloat16"), run(net, found, blocks, precision="float32")
    assert not torch.equal(low.loss_sum, full.loss_sum)
    torch.testing.assert_close(low.loss_sum, full.loss_sum, rtol=0.02, atol=0.1)
    low.loss_sum.backward()
    assert all(p.dtype == torch.float32 and p.grad.dtype == torch.float32 for p in net.parameters())


def test_the_residual_of_a_float16_target_is_not_float16():
    net, found = DraftModel(CONFIG), features()
    blocks = draw(found)
    half = dataclasses.replace(found, features=found.features.half())
    seen: list[torch.dtype] = []
    net.norm.register_forward_pre_hook(lambda _module, args: seen.append(args[0].dtype))
    run(net, half, blocks, EMBEDDING.half(), precision="bfloat16")
    assert seen == [torch.float32]


def test_anchors_depend_on_seed_index_and_draw_alone():
    base = torch.rand(4, generator=anchor_generator(0, 5, 1))
    assert torch.equal(base, torch.rand(4, generator=anchor_generator(0, 5, 1)))
    for other in ((1, 5, 1), (0, 6, 1), (0, 5, 0)):
        assert not torch.equal(base, torch.rand(4, generator=anchor_generator(*other)))


def test_the_chunk_is_whole_blocks_and_gamma_follows_the_block_size():
    settings = resolve_step_settings(TrainingConfig(), block_size=16, vocab_rows=151936, precision=torch.bfloat16)
    assert settings.gamma == 7.0
    assert settings.chunk % 15 == 0
    assert 0 < settings.chunk * 151936 * 4 <= 256 * 2**20
    one = resolve_step_settings(TrainingConfig(head_chunk=1), block_size=16, vocab_rows=8, precision=torch.float32)
    assert one.chunk == 15
