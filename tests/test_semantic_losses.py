import math

import torch
from torch.testing import assert_close

from tts_stack.semantic.losses import CTCHead, code_entropy_bits, mel_l1, transcript_loss


def test_mel_l1_averages_the_clips_own_frames_only():
    mel_hat = torch.tensor([[[1.0, 2.0, 9.0], [1.0, 4.0, 9.0]]])  # [1, 2, 3]
    frame_mask = torch.tensor([[1.0, 1.0, 0.0]])
    assert_close(mel_l1(mel_hat, torch.zeros(1, 2, 3), frame_mask), torch.tensor(2.0))


def test_mel_l1_of_equal_spectrograms_is_zero():
    mel = torch.randn(2, 5, 8)
    assert_close(mel_l1(mel, mel, torch.ones(2, 8)), torch.tensor(0.0))


def test_transcript_loss_of_one_step_is_the_symbols_surprise():
    log_probs = torch.tensor([[[0.5, 0.25, 0.25]]]).log()
    loss = transcript_loss(log_probs, torch.tensor([1]), torch.tensor([[2]]), torch.tensor([1]))
    assert_close(loss, torch.tensor(math.log(4)))


def test_transcript_that_does_not_fit_costs_nothing():
    log_probs = torch.full((1, 1, 3), 1 / 3).log()
    loss = transcript_loss(log_probs, torch.tensor([1]), torch.tensor([[1, 2]]), torch.tensor([2]))
    assert_close(loss, torch.tensor(0.0))


def test_steps_past_a_clips_end_do_not_change_the_transcript_loss():
    log_probs = torch.randn(1, 6, 4).log_softmax(-1)
    arguments = torch.tensor([4]), torch.tensor([[1, 3]]), torch.tensor([2])
    assert_close(
        transcript_loss(log_probs, *arguments), transcript_loss(log_probs[:, :4], *arguments)
    )


def test_ctc_head_gives_distributions_at_every_step():
    log_probs = CTCHead(8, 5, steps_per_token=2)(torch.randn(3, 4, 8))
    assert log_probs.shape == (3, 8, 6)
    assert_close(log_probs.exp().sum(-1), torch.ones(3, 8))


def test_entropy_of_even_use_is_log2_of_the_codes():
    assert code_entropy_bits(torch.tensor([5, 5, 5, 5, 0])) == 2.0


def test_entropy_of_one_code_is_zero():
    assert code_entropy_bits(torch.tensor([7, 0, 0])) == 0.0
