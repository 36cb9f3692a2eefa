"""What a training ran on and how much memory it took: `system.json`."""

import json
import logging
import sys
from pathlib import Path

import torch

from tts_stack.processes import is_main_process
from tts_stack.runtime import choose_device, write_text
from tts_stack.training.config import TrainerConfig
from tts_stack.training.parallel import gather_from_all

logger = logging.getLogger(__name__)
SYSTEM_FILE = "system.json"


def write_system(config: TrainerConfig, out_dir: Path, *, steps: int, seconds: float) -> None:
    """Record device, threads and peak memory; every process must call it."""
    device = choose_device(config.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    peaks = gather_from_all(peak_memory_mb(device))
    if not is_main_process():
        return
    figures = {
        "device": name,
        "processes": len(peaks),
        "threads": torch.get_num_threads(),
        "precision": config.precision,
        "steps": steps,
        "seconds": round(seconds, 1),
        "peak_memory_mb": [round(peak, 1) for peak in peaks],  # of each process
    }
    logger.info(
        "%s, %d process(es) of %d thread(s), %s, peak memory %.0f MB",
        name,
        len(peaks),
        torch.get_num_threads(),
        config.precision,
        max(peaks),
    )
    write_text(out_dir / SYSTEM_FILE, json.dumps(figures, indent=2) + "\n")


def peak_memory_mb(device: torch.device) -> float:
    """Most memory in use at once: on a GPU what torch took there, else the whole process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 1e6
    if sys.platform == "win32":
        return 0.0
    import resource  # not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak / 1e3  # Linux counts in kB
