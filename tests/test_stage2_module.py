import copy

import pytest
import torch
from stage2_support import HIDDEN_SIZE, SPEC, make_corpus, make_states, tiny_config
from torch.testing import assert_close

from stage2_vocoder.dataset import VocoderData
from stage2_vocoder.losses import ReconstructionLoss
from stage2_vocoder.metrics import num_samples, validate_vocoder
from stage2_vocoder.model import build_vocoder
from stage2_vocoder.module import AdversarialTask, ReconstructionTask, decode
from stage2_vocoder.states import StateStore
from tts_stack.training import make_fabric


@pytest.fixture
def make_task(tmp_path):
    corpus = make_corpus(tmp_path / "corpus")
    make_states(tmp_path / "states", corpus)
    store = StateStore.open(tmp_path / "states", corpus)
    data = {
        split: VocoderData.open(corpus, store, split, 10**6) for split in ("train", "validation")
    }

    def make(task_class, *overrides):
        torch.manual_seed(0)
        config = tiny_config(tmp_path / "corpus", tmp_path / "run", *overrides)
        vocoder = build_vocoder(config.vocoder, hidden_size=HIDDEN_SIZE, audio=SPEC)
        fabric = make_fabric(config.trainer)
        return task_class(fabric, vocoder, config, data["train"], data["validation"])

    return make


def weights(module):
    return copy.deepcopy(module.state_dict())


def changed(before, module):
    parameters = dict(module.named_parameters())
    return [name for name in parameters if not torch.equal(before[name], parameters[name])]


def test_the_discriminator_update_leaves_the_generator_alone(make_task):
    task = make_task(AdversarialTask)
    batch = next(iter(task.batches(0, 1)))
    generator, judges = weights(task.vocoder), weights(task.discriminators)
    task.update_discriminators(batch, decode(task.vocoder, batch).detach())
    assert not changed(generator, task.vocoder)
    assert len(changed(judges, task.discriminators)) == len(list(task.discriminators.parameters()))
    assert all(parameter.grad is None for parameter in task.vocoder.parameters())


def test_the_generator_update_leaves_the_discriminators_alone(make_task):
    task = make_task(AdversarialTask)
    batch = next(iter(task.batches(0, 1)))
    generator, judges = weights(task.vocoder), dict(task.discriminators.named_parameters())
    judges = {name: value.detach().clone() for name, value in judges.items()}
    task.update_generator(batch, decode(task.vocoder, batch))
    assert len(changed(generator, task.vocoder)) == len(list(task.vocoder.parameters()))
    assert not changed(judges, task.discriminators)
    assert all(parameter.grad is None for parameter in task.discriminators.parameters())
    assert all(parameter.requires_grad for parameter in task.discriminators.parameters())


def test_the_generator_hears_the_discriminators(make_task):
    quiet = ("losses.mel_weight=0", "losses.stft_weight=0", "losses.feature_weight=0")
    task = make_task(AdversarialTask, *quiet)
    batch = next(iter(task.batches(0, 1)))
    before = weights(task.vocoder)
    figures = task.update_generator(batch, decode(task.vocoder, batch))
    assert figures["generator/total"] == 0 and figures["generator/grad_norm"] > 0
    assert changed(before, task.vocoder)


def test_in_the_warm_up_the_discriminators_learn_alone(make_task):
    task = make_task(AdversarialTask, "adversarial.warmup_steps=1")
    first, second = task.batches(0, 2)
    before = weights(task.vocoder)
    task.train_step(first, 0)
    assert not changed(before, task.vocoder)
    task.train_step(second, 1)
    assert changed(before, task.vocoder)


def test_decoding_a_crop_or_the_whole_gives_the_same_audio(make_task):
    crop = make_task(AdversarialTask, "adversarial.decode=crop")
    full = make_task(AdversarialTask, "adversarial.decode=full")
    with torch.no_grad():
        for one, other in zip(crop.batches(0, 4), full.batches(0, 4), strict=True):
            assert_close(one.audio, other.audio, rtol=0, atol=0)
            assert_close(
                decode(crop.vocoder, one), decode(full.vocoder, other), atol=1e-5, rtol=1e-5
            )


def test_generated_audio_is_silent_where_a_short_clip_is_padded(make_task):
    task = make_task(AdversarialTask, "adversarial.crop_seconds=1.0")
    batch = next(iter(task.batches(0, 1)))
    audio_hat = decode(task.vocoder, batch)
    for row, count in enumerate(num_samples(batch, SPEC).tolist()):
        assert torch.all(audio_hat[row, count:] == 0)
        assert audio_hat[row, :count].abs().max() > 0


def test_a_batch_has_the_weighted_mean_of_its_items_losses(make_task):
    task = make_task(ReconstructionTask)
    data, loss = task.train_data, ReconstructionLoss(task.config.losses, SPEC)

    def total(rows):
        batch = data.whole(rows)
        return loss(decode(task.vocoder, batch), batch.audio, num_samples(batch, SPEC)).total

    counts = [data.states.num_tokens(row) for row in (0, 1)]
    with torch.no_grad():
        wanted = (total([0]) * counts[0] + total([1]) * counts[1]) / sum(counts)
        assert_close(total([0, 1]), wanted, atol=1e-4, rtol=1e-4)


def test_the_average_of_the_generator_is_what_is_validated_and_kept(make_task):
    task = make_task(AdversarialTask, "adversarial.ema_decay=0.75")
    before = weights(task.vocoder)
    task.train_step(next(iter(task.batches(0, 1))), 0)
    after, kept = weights(task.vocoder), task.weights()
    for name, _ in task.vocoder.named_parameters():
        assert_close(kept[name], 0.75 * before[name] + 0.25 * after[name])
    figures = task.validate()
    assert not changed(after, task.vocoder)  # bit for bit
    task.vocoder.load_state_dict(kept)
    assert (
        validate_vocoder(task.vocoder, task.validation, task.loss, torch.device("cpu")) == figures
    )


def test_a_non_finite_batch_changes_no_weight(make_task):
    for task_class in (ReconstructionTask, AdversarialTask):
        task = make_task(task_class)
        batch = next(iter(task.batches(0, 1)))
        before = [weights(task.vocoder), task.weights()]
        task.train_step(batch._replace(audio=batch.audio * float("nan")), 0)
        assert not changed(before[0], task.vocoder)
        assert_close(task.weights(), before[1], rtol=0, atol=0)


def test_reconstruction_learns(make_task):
    task = make_task(ReconstructionTask, "reconstruction.optimizer.learning_rate=1e-2")
    before = task.validate()
    losses = [
        float(task.train_step(batch, step)["total"])
        for step, batch in enumerate(task.batches(0, 40))
    ]
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])
    assert task.validate()["mel"] < before["mel"]
