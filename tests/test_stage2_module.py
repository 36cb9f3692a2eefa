import copy
import math

import pytest
import torch
from stage2_support import HIDDEN_SIZE, SPEC, make_corpus, make_states, tiny_config
from torch.testing import assert_close

from stage2_vocoder.dataset import VocoderData
from stage2_vocoder.losses import ReconstructionLoss
from stage2_vocoder.metrics import num_samples, validate_vocoder
from stage2_vocoder.model import build_vocoder
from stage2_vocoder.module import AdversarialTask, ReconstructionTask
from stage2_vocoder.states import StateStore
from stage2_vocoder.step import decode
from tts_stack.errors import CheckpointError
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


def pad_states(batch, width=40):
    missing = width - batch.hidden_states.shape[-1]
    padded = torch.nn.functional.pad(batch.hidden_states, (0, missing))
    return batch._replace(hidden_states=padded)


def weights(module):
    return copy.deepcopy(module.state_dict())


def changed(before, module):
    parameters = dict(module.named_parameters())
    return [name for name in parameters if not torch.equal(before[name], parameters[name])]


def test_the_discriminator_update_leaves_the_generator_alone(make_task):
    task = make_task(AdversarialTask)
    batch = next(iter(task.batches(0, 1)))
    generator, judges = weights(task.vocoder), weights(task.discriminators)
    task.update_discriminators(batch, [decode(task.vocoder, batch[0]).detach()])
    assert not changed(generator, task.vocoder)
    assert len(changed(judges, task.discriminators)) == len(list(task.discriminators.parameters()))
    assert all(parameter.grad is None for parameter in task.vocoder.parameters())


def test_the_generator_update_leaves_the_discriminators_alone(make_task):
    task = make_task(AdversarialTask)
    batch = next(iter(task.batches(0, 1)))
    generator, judges = weights(task.vocoder), dict(task.discriminators.named_parameters())
    judges = {name: value.detach().clone() for name, value in judges.items()}
    task.update_generator(batch, None)
    assert len(changed(generator, task.vocoder)) == len(list(task.vocoder.parameters()))
    assert not changed(judges, task.discriminators)
    assert all(parameter.grad is None for parameter in task.discriminators.parameters())
    assert all(parameter.requires_grad for parameter in task.discriminators.parameters())


def test_the_generator_hears_the_discriminators(make_task):
    quiet = ("losses.mel_weight=0", "losses.stft_weight=0", "losses.feature_weight=0")
    task = make_task(AdversarialTask, *quiet)
    batch = next(iter(task.batches(0, 1)))
    before = weights(task.vocoder)
    figures = task.update_generator(batch, None)
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


def test_the_judged_crop_is_the_same_decoded_alone_or_inside_its_utterance(make_task):
    crop = make_task(AdversarialTask, "adversarial.decode=crop")
    full = make_task(AdversarialTask, "adversarial.decode=full")
    with torch.no_grad():
        for (one,), (other,) in zip(crop.batches(0, 4), full.batches(0, 4), strict=True):
            recorded = crop.crop_of(one.audio, one), full.crop_of(other.audio, other)
            assert_close(*recorded, rtol=0, atol=0)
            audio_hat = decode(crop.vocoder, one), decode(full.vocoder, other)
            assert audio_hat[0].shape[1] < audio_hat[1].shape[1]
            assert_close(
                crop.crop_of(audio_hat[0], one),
                full.crop_of(audio_hat[1], other),
                atol=1e-5,
                rtol=1e-5,
            )


def test_a_crop_decoded_alone_is_judged_whole(make_task):
    task = make_task(AdversarialTask, "adversarial.decode=crop")
    (batch,) = next(iter(task.batches(0, 1)))
    assert_close(task.crop_of(batch.audio, batch), batch.audio, rtol=0, atol=0)


def test_decoding_in_full_keeps_the_spectral_losses_on_the_whole_utterance(make_task):
    task = make_task(AdversarialTask, "adversarial.decode=full")
    batch = next(iter(task.batches(0, 1)))
    (micro,) = batch
    with torch.no_grad():
        audio_hat = decode(task.vocoder, micro)
        wanted = task.loss(audio_hat, micro.audio, num_samples(micro, SPEC))
    figures = task.update_generator(batch, None)
    assert figures["generator/mel"] == pytest.approx(float(wanted.mel), rel=1e-5)
    counts = task.train_data.num_tokens()
    assert set(micro.num_tokens.tolist()) <= set(counts.tolist())
    assert int(micro.crop_tokens.max()) == task.crop < int(micro.num_tokens.max())


def test_decoding_in_full_shows_the_discriminators_the_crop_alone(make_task):
    """What is outside may change at will: their update stays the same."""
    first, second = (make_task(AdversarialTask, "adversarial.decode=full") for _ in range(2))
    (micro,) = next(iter(first.batches(0, 1)))
    audio_hat = decode(first.vocoder, micro).detach()
    size = SPEC.samples_per_token
    place = torch.arange(micro.audio.shape[1])
    begins, counts = micro.crop_starts * size, micro.crop_tokens * size
    is_crop = (place >= begins[:, None]) & (place < (begins + counts)[:, None])
    assert not is_crop.all()
    changed_outside = micro._replace(audio=torch.where(is_crop, micro.audio, 0.5))
    one = first.update_discriminators([micro], [audio_hat])
    other = second.update_discriminators([changed_outside], [torch.where(is_crop, audio_hat, -0.5)])
    assert one == other


def test_generated_audio_is_silent_where_a_short_clip_is_padded(make_task):
    task = make_task(AdversarialTask, "adversarial.crop_seconds=1.0")
    (batch,) = next(iter(task.batches(0, 1)))
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
        validate_vocoder(task.vocoder, task.validator.batches, task.loss, torch.device("cpu"))
        == figures
    )


@pytest.mark.parametrize("task_class", [ReconstructionTask, AdversarialTask])
def test_a_non_finite_batch_changes_no_weight(make_task, task_class):
    task = make_task(task_class)
    (batch,) = next(iter(task.batches(0, 1)))
    task.train_step([batch], 0)  # now the average is not the weights
    before = [weights(task.vocoder), copy.deepcopy(task.weights())]
    judges = getattr(task, "discriminators", None)
    parameters = [one.detach().clone() for one in judges.parameters()] if judges else []
    task.train_step([batch._replace(audio=batch.audio * float("nan"))], 1)
    assert not changed(before[0], task.vocoder)
    assert_close(task.weights(), before[1], rtol=0, atol=0)
    if judges:
        assert_close(list(judges.parameters()), parameters, rtol=0, atol=0)


@pytest.mark.parametrize("task_class", [ReconstructionTask, AdversarialTask])
def test_a_longer_gradient_is_clipped_to_the_configured_norm(make_task, task_class):
    limits = ("reconstruction.optimizer", "adversarial.generator", "adversarial.discriminator")
    task = make_task(task_class, *(f"{place}.max_grad_norm=1e-3" for place in limits))
    figures = task.train_step(next(iter(task.batches(0, 1))), 0)
    modules = {"grad_norm": task.vocoder}
    if task_class is AdversarialTask:
        modules = {
            "generator/grad_norm": task.vocoder,
            "discriminator/grad_norm": task.discriminators,
        }
    for name, module in modules.items():
        gradients = [one.grad for one in module.parameters() if one.grad is not None]
        assert figures[name] > 2e-3
        assert float(torch.nn.utils.get_total_norm(gradients)) == pytest.approx(1e-3, rel=1e-2)


def test_schedules_count_each_networks_own_steps(make_task):
    task = make_task(
        AdversarialTask,
        "adversarial.warmup_steps=4",
        "adversarial.max_steps=12",
        "adversarial.schedule.warmup_steps=1",
    )
    rates = []
    for step in range(12):
        task.set_learning_rates(step)
        optimizers = (task.generator_optimizer, task.discriminator_optimizer)
        rates.append([one.param_groups[0]["lr"] / 2e-4 for one in optimizers])
    generator, discriminator = zip(*rates, strict=True)
    factor = task.phase.schedule.factor
    assert generator[4:] == pytest.approx([factor(step, 8) for step in range(8)])
    assert discriminator == pytest.approx([factor(step, 12) for step in range(12)])
    assert generator[4] == 0.5 and generator[5] == 1.0  # its own warm-up, once it learns


def test_a_step_does_not_depend_on_how_it_is_divided(make_task):
    """Two micro-batches, whose graphs are not kept, or one of both."""
    quiet = "adversarial.crop_seconds=0.25"  # shorter than every clip: crops of one length
    pair = make_task(AdversarialTask, "trainer.accumulate=2", quiet)
    one = make_task(AdversarialTask, "adversarial.batch_size=6", quiet)
    (parts,) = pair.batches(0, 1)
    whole = type(parts[0])(*(torch.cat(both) for both in zip(*map(pad_states, parts), strict=True)))
    figures = pair.train_step(parts, 0), one.train_step([whole], 0)
    for name in figures[1]:
        if name != "num_positions":
            assert figures[0][name] == pytest.approx(figures[1][name], rel=2e-4, abs=1e-6), name
    norms = [copy.deepcopy([p.grad for p in task.vocoder.parameters()]) for task in (pair, one)]
    assert_close(norms[0], norms[1], rtol=1e-3, atol=1e-5)


def test_whole_utterances_divided_give_the_loss_of_all_together(make_task):
    task = make_task(ReconstructionTask, "trainer.accumulate=2")
    together = make_task(ReconstructionTask)
    data = task.train_data
    found = task.train_step([data.whole([0, 1]), data.whole([2])], 0)
    wanted = together.train_step([data.whole([0, 1, 2])], 0)
    for name in ("total", "mel", "stft", "grad_norm"):
        assert found[name] == pytest.approx(wanted[name], rel=1e-3), name


def test_the_noise_is_in_training_batches_and_never_in_validation(make_task):
    for task_class in (ReconstructionTask, AdversarialTask):
        plain, noisy = make_task(task_class), make_task(task_class, "data.state_noise=0.5")
        (one,), (other,) = (next(iter(task.batches(3, 4))) for task in (plain, noisy))
        assert not torch.equal(one.hidden_states, other.hidden_states)
        assert torch.equal(one.audio, other.audio)
        (again,) = next(iter(noisy.batches(3, 4)))
        assert torch.equal(again.hidden_states, other.hidden_states)
        for left, right in zip(plain.validator.batches, noisy.validator.batches, strict=True):
            assert_close(left, right, rtol=0, atol=0)
        assert noisy.validate() == plain.validate()


def test_silent_items_are_counted_and_do_no_harm(make_task):
    task = make_task(ReconstructionTask)
    batch = task.train_data.whole([0, 1])
    heard = task.train_step([batch], 0)
    silent = batch._replace(audio=torch.stack([batch.audio[0], torch.zeros(len(batch.audio[1]))]))
    figures = task.train_step([silent], 1)
    assert (heard["silent_items"], figures["silent_items"]) == (0, 1)
    assert figures["stft"] < 10 and figures["grad_norm"] < 10 * heard["grad_norm"]


@pytest.mark.parametrize("task_class", [ReconstructionTask, AdversarialTask])
def test_a_batch_of_silence_alone_is_learnt_from(make_task, task_class):
    task = make_task(task_class)
    (batch,) = next(iter(task.batches(0, 1)))
    before = weights(task.vocoder)
    figures = task.train_step([batch._replace(audio=torch.zeros_like(batch.audio))], 0)
    assert all(map(math.isfinite, figures.values()))
    assert changed(before, task.vocoder)


def test_a_checkpoint_of_the_other_phase_is_refused(make_task):
    one, other = make_task(ReconstructionTask), make_task(AdversarialTask)
    with pytest.raises(CheckpointError, match="of phase reconstruction, expected adversarial"):
        other.load_state_dict(one.state_dict())


def test_a_task_reports_the_tokens_it_computed(make_task):
    task = make_task(ReconstructionTask)
    figures = task.train_step([task.train_data.whole([0, 1])], 0)
    assert (figures["num_tokens"], figures["num_positions"]) == (45 + 16, 2 * 45)


def test_reconstruction_learns(make_task):
    task = make_task(ReconstructionTask, "reconstruction.optimizer.learning_rate=1e-2")
    before = task.validate()
    losses = [
        float(task.train_step(batch, step)["total"])
        for step, batch in enumerate(task.batches(0, 40))
    ]
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])
    assert task.validate()["mel"] < before["mel"]
