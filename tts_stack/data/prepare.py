"""`tts-stack prepare`: a user's recordings and transcripts -> a corpus of checked Parquet shards.

Source lines -> plan -> shards, in parallel -> corpus.json, report.json and rejected.jsonl.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from tts_stack.contract import TextSpec
from tts_stack.data.config import PrepareConfig
from tts_stack.data.corpora.detect import read_corpus
from tts_stack.data.corpora.source import SourceCorpus
from tts_stack.data.part import Frontend, Part, PartJob, finished_part, prepare_part, shard_name
from tts_stack.data.plan import Plan, choose_validation, make_plan, open_output
from tts_stack.data.report import (
    REASONS,
    REJECTED_FILE,
    PrepareReport,
    RejectedItem,
    count_reasons,
    write_rejected,
)
from tts_stack.data.workers import run_jobs
from tts_stack.errors import DataError
from tts_stack.shards import SPLITS, Corpus, CorpusInfo, write_info
from tts_stack.text.frontend import build_frontend as default_build_frontend

OnProgress = Callable[[int, int], None]  # (source lines done, source lines in all)


def prepare(
    config: PrepareConfig,
    *,
    on_progress: OnProgress = lambda done, total: None,
    build_frontend: Callable[[TextSpec], Frontend] = default_build_frontend,
) -> PrepareReport:
    """Prepare a corpus; a run that was killed continues, a finished one is left as it is.

    Args:
        config: source, output folder and settings.
        on_progress: called in this process whenever a shard is finished.
        build_frontend: makes the text front-end; a module-level function, because worker
            processes call it too.

    Returns:
        What was kept and left out.

    Raises:
        DataError: the source is not understood, no line of it can be used, or the output folder
            holds something else.
        ConfigError: the text engine does not speak the language, or the output folder cannot be
            written.
        MissingDependencyError: the text engine is not installed.
    """
    build_frontend(config.text.spec())  # its errors come before any work
    source = read_corpus(Path(config.source))
    plan = make_plan(config, source.items)
    folder = Path(config.corpus)
    open_output(folder, plan, config)
    if _is_finished(folder, plan):
        return PrepareReport.load(folder)

    validation_ids = _choose_validation([item.id for item in plan.items], config)
    jobs = _make_jobs(plan, config, validation_ids, build_frontend)
    parts = _run(jobs, config, on_progress)
    kept = [id for part in parts for ids in part.kept.values() for id in ids]
    if len(kept) > 0 and not all(any(part.kept[split] for part in parts) for split in SPLITS):
        # Rejections emptied a split: choose again among what was kept; few shards change.
        jobs = _make_jobs(plan, config, _choose_validation(kept, config), build_frontend)
        parts = _run(jobs, config, on_progress)
    return _finish(folder, source, plan, parts)


def _is_finished(folder: Path, plan: Plan) -> bool:
    try:
        return Corpus.open(folder).info.config_hash == plan.config_hash
    except DataError:
        return False


def _choose_validation(ids: Sequence[str], config: PrepareConfig) -> frozenset[str]:
    return choose_validation(
        ids,
        seed=config.seed,
        fraction=config.validation_fraction,
        max_count=config.max_validation,
    )


def _make_jobs(
    plan: Plan,
    config: PrepareConfig,
    validation_ids: frozenset[str],
    build_frontend: Callable[[TextSpec], Frontend],
) -> list[PartJob]:
    jobs = []
    for index in range(plan.num_shards):
        items = plan.shard_items(index)
        chosen = validation_ids & {item.id for item in items}
        jobs.append(PartJob(index, items, chosen, config, plan.config_hash, build_frontend))
    return jobs


def _run(jobs: Sequence[PartJob], config: PrepareConfig, on_progress: OnProgress) -> list[Part]:
    """Parts in order, those finished earlier taken from disk."""
    folder = Path(config.corpus)
    earlier = {job.index: finished_part(folder, job) for job in jobs}
    parts = {index: part for index, part in earlier.items() if part is not None}
    total = sum(len(job.items) for job in jobs)
    done = sum(len(job.items) for job in jobs if job.index in parts)
    on_progress(done, total)
    pending = [job for job in jobs if job.index not in parts]
    for job, part in run_jobs(prepare_part, pending, num_workers=config.num_workers):
        parts[job.index] = part
        done += len(job.items)
        on_progress(done, total)
    return [parts[job.index] for job in jobs]


def _finish(folder: Path, source: SourceCorpus, plan: Plan, parts: Sequence[Part]) -> PrepareReport:
    rejected = [*source.rejected, *(item for part in parts for item in part.rejected)]
    write_rejected(folder, rejected)
    report = PrepareReport(
        corpus=str(folder),
        layout=source.layout,
        kept={split: sum(len(part.kept[split]) for part in parts) for split in SPLITS},
        seconds={split: sum(part.seconds[split] for part in parts) for split in SPLITS},
        rejected=count_reasons(rejected),
    )
    if not report.num_kept:
        raise _nothing_kept(folder, rejected)
    report.save(folder)
    write_info(folder, _corpus_info(plan, parts, report))  # last: now the corpus is finished
    return report


def _corpus_info(plan: Plan, parts: Sequence[Part], report: PrepareReport) -> CorpusInfo:
    shards = {
        split: tuple(shard_name(split, i) for i, part in enumerate(parts) if part.kept[split])
        for split in SPLITS
    }
    return CorpusInfo(
        sample_rate=plan.settings["sample_rate"],
        text=TextSpec(**plan.settings["text"]),
        symbols=tuple(sorted({symbol for part in parts for symbol in part.train_symbols})),
        config_hash=plan.config_hash,
        shards=shards,
        num_utterances=report.kept,
        seconds=report.seconds,
    )


def _nothing_kept(folder: Path, rejected: Sequence[RejectedItem]) -> DataError:
    counts = ", ".join(
        f"{count} {REASONS[reason]}" for reason, count in count_reasons(rejected).items()
    )
    first = rejected[0]
    return DataError(
        f"{folder}: none of {len(rejected)} lines can be used ({counts}); the first is "
        f"{first.place}: {first.message}. All are in {folder / REJECTED_FILE}"
    )
