"""Record the readings that tuning one kernel takes on this device, so that they can be replayed where there is none.

Prints one JSON object, a ``Recording`` (``kalign_core/hal/recording.py``): microseconds by configuration, warm and
cold, in the order in which they were taken. ``python benchmarks/record_timings.py rms_norm T=4096,H=4096``.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("operator")
    parser.add_argument("shape")
    parser.add_argument("--kernel", help="Which of the operator's kernels; its first by default.")
    options = parser.parse_args()

    import torch

    from kalign_core import hal, ops, settings
    from kalign_core.api import recorded
    from kalign_core.cli.problems import parse_shape
    from kalign_core.hal.recording import RecordingPlatform
    from kalign_core.session import Session

    operator = ops.named(options.operator)
    platform = RecordingPlatform(hal.platform)
    with tempfile.TemporaryDirectory() as folder:
        here = Session(
            platform=platform, configuration=settings.read({"KALIGN_CACHE_DIR": str(Path(folder) / "cache")})
        )
        with here.active():
            device = torch.device(platform.device_type)
            sizes = operator.sizes(parse_shape(options.shape))
            call = recorded(operator, *operator.inputs(sizes, operator.dtypes[0], 0, device))[0]
            here.tune(call.kernel, call.problem, call.device)
            here.close()
    print(json.dumps(asdict(platform.recorded(options.kernel or call.kernel.name)), indent=1))


if __name__ == "__main__":
    main()
