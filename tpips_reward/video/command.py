"""The command `tpips-reward video`."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from tpips_reward.errors import TPIPSError
from tpips_reward.files import check_writable
from tpips_reward.metric import Metric
from tpips_reward.video.frames import frame_at, read_frames
from tpips_reward.video.timeline import measure, write_csv, write_plot


def run_video(options: argparse.Namespace, load: Callable[[], Metric]) -> None:
    """Writes timeline.csv and timeline.png; the reference is read before the metric is loaded.

    Raises:
        TPIPSError: as `read_frames` and `measure`; a timeline that is there without --overwrite, an output that is no folder.
    """
    table, plot = options.output / "timeline.csv", options.output / "timeline.png"
    check_writable(options.output)
    for path in (table, plot):
        if path.exists() and not options.overwrite:
            raise TPIPSError(f"{path} is there already; replace it with --overwrite.")
    if options.every < 1:
        raise TPIPSError(f"--every is {options.every}; give at least 1.")
    reference = frame_at(options.source, options.reference, options.fps)
    frames = read_frames(options.source, options.every, options.fps)
    timeline = measure(frames, reference.pixels, options.aspect, load(), options.batch_images)
    write_csv(timeline, table)
    write_plot(timeline, plot, f"{options.source.name}, compared with frame {options.reference}")
    print(f"{len(timeline.frames)} frames in {len(timeline.aspects)} aspects: {table}, {plot}")
