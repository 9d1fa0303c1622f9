"""Tables of QDQ-Bench in the formats of others: Kernel Tuner's T4 (version 1.0.0) and Croissant metadata (1.0).

T4: Willemsen et al. 2024, "A methodology for comparing optimization algorithms for auto-tuning", and the schemas in
`kernel_tuner/schema/T4`. Croissant: Akhtar et al. 2024, "Croissant: A metadata format for ML-ready datasets".
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from harness.base.errors import UserError
from harness.base.files import explain_write_errors, file_sha256, write_text
from harness.base.statistics import median_ci
from harness.graph.forest import write_forest
from harness.measure.records import Failed, Measured, Outcome
from harness.replay.bench.accuracy import ACCURACY_FILE, ACCURACY_SCHEMA, join_accuracy, read_accuracy
from harness.replay.bench.tasks import ARCHIVE_FILE, data_folder, describe_task, read_catalogue, table_path
from harness.runtimes.replay import TABLE_SCHEMA, BenchmarkTable, read_table

T4_VERSION = "1.0.0"
T4_INVALIDITY = {"build": "compile", "timeout": "timeout", "evaluate": "correctness"}
CROISSANT_TERMS = (
    "column", "dataType", "extract", "field", "fileObject", "fileProperty", "fileSet", "format", "includes", "jsonPath",
    "key", "md5", "parentField", "path", "recordSet", "references", "regex", "repeated", "replace", "separator",
    "source", "subField", "transform", "citeAs", "isLiveDataset", "samplingRate", "equivalentProperty",
)  # fmt: skip
CROISSANT_TYPES = (
    (pa.types.is_boolean, "sc:Boolean"),
    (pa.types.is_integer, "sc:Integer"),
    (pa.types.is_floating, "sc:Float"),
)
SCORES = (
    "accuracy of the placements of all tables by model, precision, dialect and digest, as the Q/DQ file describes it"
)
ARCHIVED = "tables of the tier `extended`"
LICENCE = "https://www.apache.org/licenses/LICENSE-2.0"
DESCRIPTION = (
    "Recorded latencies of every placement of Q/DQ pairs in some dimensions of an ONNX model, on one runtime and one "
    "processor for each table; every row has the raw samples of a placement. Tables of transformers on ONNX Runtime "
    "are of files with float biases, of which that runtime computes fewer operators in INT8 than of today's files."
)


def write_t4(out: Path) -> list[Path]:
    """Write the results and the metadata of every table for Kernel Tuner to the folder `out`; return the files."""
    scores = read_accuracy(data_folder() / ACCURACY_FILE)
    written = []
    for name in read_catalogue().tasks:
        table = join_accuracy(read_table(table_path(name)), scores)
        space, written_s = table.subspace.space, table_path(name).stat().st_mtime
        results = []
        for placement in table.subspace.placements():
            choices = zip(space.dimensions, placement.choices, strict=True)
            configuration = {dimension.name: dimension.choices[choice] for dimension, choice in choices}
            timestamp = datetime.fromtimestamp(written_s, UTC).isoformat()
            result = {"timestamp": timestamp, "configuration": configuration, "objectives": ["time"]}
            results.append(result | _t4_outcome(table.row(placement).outcome))
        facts = table.metadata
        packages = [f"{key}=={value}" for key, value in facts.environment.get("packages", {}).items()]
        hardware = {
            "hardware_description": [facts.backend | {"cpu": facts.environment.get("cpu")}],
            "operating_system": str(facts.environment.get("system", "")),
        }
        environment = {"device_query": {"device": facts.backend["device"]}, "requirements": packages}
        described = {"zenodo": {}, "hardware": hardware, "environment": environment}
        documents: dict[str, dict[str, Any]] = {"T4": {"results": results}, "metadata": {"metadata": described}}
        for kind, document in documents.items():
            written.append(_write_json(out / f"{name}-{kind}.json", {"schema_version": T4_VERSION, **document}))
    return written


def _t4_outcome(outcome: Outcome) -> dict[str, Any]:
    """Return times in milliseconds, validity and measurements of a placement."""
    unused = {"framework": 0.0, "search_algorithm": 0.0}
    if isinstance(outcome, Failed):
        times = {"compilation_time": 1000 * outcome.wall_s, "runtimes": [], **unused, "validation": 0.0}
        invalidity = T4_INVALIDITY.get(outcome.stage, "runtime")
        return {"times": times, "invalidity": invalidity, "correctness": 0, "measurements": []}
    times = {
        "compilation_time": 1000 * outcome.build_s,
        "runtimes": list(outcome.samples_ms),
        **unused,
        "validation": 1000 * outcome.evaluate_s,
    }
    measurements = [{"name": "time", "value": median_ci(outcome.samples_ms).value, "unit": "ms"}]
    measurements += [{"name": name, "value": value, "unit": ""} for name, value in outcome.metrics.items()]
    return {"times": times, "invalidity": "correct", "correctness": 1, "measurements": measurements}


def write_croissant(out: Path) -> list[Path]:
    """Write `croissant.json`, the metadata of all tables with their digests, and return the file."""
    names, scores = list(read_catalogue().tasks), data_folder() / ACCURACY_FILE
    files = {data_folder() / ARCHIVE_FILE: ARCHIVED, scores: SCORES}
    distribution = [_croissant_file(path, text) for path, text in files.items() if path.is_file()]
    for name in names:
        facts, path = describe_task(name), table_path(name)
        described = ", ".join(facts[key] for key in ("family", "runtime", "processor", "split"))
        entry = _croissant_file(path, f"{described}; threads: {facts['threads']}")
        inside = path.is_relative_to(data_folder())
        distribution.append(entry if inside else entry | {"containedIn": {"@id": ARCHIVE_FILE}})
    document = {
        "@context": {
            "@language": "en",
            "@vocab": "https://schema.org/",
            "sc": "https://schema.org/",
            "cr": "http://mlcommons.org/croissant/",
            "rai": "http://mlcommons.org/croissant/RAI/",
            "dct": "http://purl.org/dc/terms/",
            "conformsTo": "dct:conformsTo",
            "data": {"@id": "cr:data", "@type": "@json"},
            "examples": {"@id": "cr:examples", "@type": "@json"},
            **{term: f"cr:{term}" for term in CROISSANT_TERMS},
            "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
        },
        "@type": "sc:Dataset",
        "name": "qdq-bench",
        "conformsTo": "http://mlcommons.org/croissant/1.0",
        "description": DESCRIPTION,
        "license": LICENCE,
        "url": "https://pypi.org/project/qdq-bench/",
        "version": "0.1.0",
        "datePublished": "2026-11-26",
        "citeAs": "QDQ-Bench: recorded placements of Q/DQ pairs (CITATION.cff)",
        "distribution": distribution,
        "recordSet": [
            *(_croissant_records(name, f"{name}.parquet", TABLE_SCHEMA) for name in names),
            *([_croissant_records("accuracy", scores.name, ACCURACY_SCHEMA)] if scores.is_file() else []),
        ],
    }
    return [_write_json(out / "croissant.json", document)]


def _croissant_file(path: Path, description: str) -> dict[str, Any]:
    inside = path.is_relative_to(data_folder())
    return {
        "@type": "cr:FileObject",
        "@id": path.name,
        "name": path.name,
        "description": description,
        "contentUrl": path.relative_to(data_folder()).as_posix() if inside else path.name,
        "contentSize": f"{path.stat().st_size} B",
        "encodingFormat": "application/zip" if path.suffix == ".zip" else "application/x-parquet",
        "sha256": file_sha256(path),
    }


def _croissant_records(name: str, file: str, schema: pa.Schema) -> dict[str, Any]:
    fields = [
        {
            "@type": "cr:Field",
            "@id": f"{name}/{column.name}",
            "name": column.name,
            "dataType": next(
                (name for holds, name in CROISSANT_TYPES if holds(getattr(column.type, "value_type", column.type))),
                "sc:Text",
            ),
            "source": {"fileObject": {"@id": file}, "extract": {"column": column.name}},
        }
        | ({"repeated": True} if pa.types.is_list(column.type) else {})
        for column in schema
        if not pa.types.is_map(column.type)
    ]
    return {"@type": "cr:RecordSet", "@id": name, "name": name, "field": fields}


def _write_json(path: Path, document: Any) -> Path:
    write_text(path, json.dumps(document, indent=1) + "\n")
    return path


Floats = npt.NDArray[np.float64]
TREES, FOLDS, COVERAGE = 100, 5, 0.9
MIN_READINGS = 50


def write_surrogate(table: BenchmarkTable, path: Path) -> dict[str, float]:
    """Train a surrogate of a model's whole space, write it as an ONNX file, and return its error.

    A table enumerates some dimensions and also has readings near named placements. Trees with random splits (Geurts et
    al. 2006) are trained on all readings, so placements outside of the table get a prediction with an interval.

    The model has the input `choices`, int64 as [placements, dimensions of the whole space], and the outputs
    `latency_ms`, `low_ms` and `high_ms`. Its metadata have the error and the names of the dimensions.

    Returns:
        readings: Number of placements in the training data.
        rank_correlation: Spearman's correlation of predicted and recorded latencies of held-out placements.
        ceiling: Highest correlation that the noise of the readings allows, from two halves of the samples.
        outside: Rank correlation over placements outside of the table's subspace; NaN for fewer than 10.
        interval: Factor of the interval: latency / interval to latency * interval.
        coverage: Share of held-out placements within an interval from the other folds; the target is 0.9.

    Raises:
        UserError: The table has too few readings, or the file cannot be written.
    """
    readings = {digest: row for digest, row in table.rows.items() if isinstance(row.outcome, Measured)}
    if len(readings) < MIN_READINGS:
        raise UserError(f"{table.path}: {len(readings)} readings, fewer than the {MIN_READINGS} of a surrogate")
    choices = np.array([row.choices for row in readings.values()])
    features = np.hstack([choices, (choices > 0).sum(axis=1, keepdims=True)]).astype(np.float64)
    samples = [row.outcome.samples_ms for row in readings.values() if isinstance(row.outcome, Measured)]
    target, subspace = np.log([median_ci(each).value for each in samples]), table.subspace
    inside = {subspace.full_space.digest(subspace.to_full_space(placement)) for placement in subspace.placements()}
    outside = np.array([digest not in inside for digest in readings])
    error = _cross_validate(features, target, samples, outside)
    facts = {"model": table.metadata.model, "model_sha256": table.metadata.model_sha256, **error}
    names = ",".join(dimension.name for dimension in subspace.full_space.dimensions)
    props = {name: str(value) for name, value in facts.items()} | {"dimensions": names}
    with explain_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_forest(_fit(features, target), features.shape[1] - 1, error["interval"], props, path)
    return error


def _fit(features: Floats, target: Floats) -> Any:
    from sklearn.ensemble import ExtraTreesRegressor  # takes a second to import

    return ExtraTreesRegressor(TREES, random_state=0).fit(features, target)


def _cross_validate(
    features: Floats, target: Floats, samples: Sequence[Sequence[float]], outside: npt.NDArray[np.bool_]
) -> dict[str, float]:
    fold, predicted = np.random.default_rng(0).permutation(len(target)) % FOLDS, np.zeros(len(target))
    for each in range(FOLDS):
        trees = _fit(features[fold != each], target[fold != each])
        predicted[fold == each] = trees.predict(features[fold == each])
    missed = np.abs(predicted - target)
    covered = [missed[fold == each] <= np.quantile(missed[fold != each], COVERAGE) for each in range(FOLDS)]
    # The correlation of a perfect prediction with the readings (Spearman and Brown, 1910).
    rng = np.random.default_rng(0)
    halves = [[np.median(half) for half in np.array_split(rng.permutation(each), 2)] for each in samples]
    between = max(0.0, _rank_correlation(*np.array(halves).T))
    return {
        "readings": len(target),
        "rank_correlation": _rank_correlation(predicted, target),
        "ceiling": float(np.sqrt(2 * between / (1 + between))),
        "outside": _rank_correlation(predicted[outside], target[outside]) if outside.sum() >= 10 else float("nan"),
        "interval": float(np.exp(np.quantile(missed, COVERAGE))),
        "coverage": float(np.concatenate(covered).mean()),
    }


def _rank_correlation(first: Floats, second: Floats) -> float:
    from scipy.stats import spearmanr

    return float(spearmanr(first, second).statistic)
