"""The output and error file of a batch that ends."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct
from msgspec.structs import replace

from dynamo.common.process.work import Hold
from dynamo.frontend.api.openai.batches.batch import Batch, result_file_id
from dynamo.frontend.api.openai.batches.files import Files
from dynamo.frontend.api.openai.batches.long_texts import joined
from dynamo.frontend.api.openai.batches.segments import Segment


class ResultFiles(Struct, frozen=True):
    """The files that were written; none if there was nothing for them."""

    output_id: str | None = None
    error_id: str | None = None
    size_bytes: int = 0
    """Bytes of the results in them."""

    def named_in(self, batch: Batch) -> Batch:
        return replace(batch, output_file_id=self.output_id, error_file_id=self.error_id)


NO_FILES = ResultFiles()


async def write_results(
    files: Files, owner: str, batch: Batch, done: Mapping[int, Segment], hold: Hold, of_missing: bytes = b""
) -> ResultFiles:
    """Write the results of a batch, by segment, into its files; `of_missing` follows in the error file.

    `hold` counts what it has in memory. Raises Overloaded, Unavailable.
    """
    hold(sum(segment.size_bytes for segment in done.values()))  # beside what the files are made of
    outputs = await joined(done[number].outputs for number in sorted(done))
    errors = await joined(done[number].errors for number in sorted(done))
    ids: dict[str, str] = {}
    for kind, content, counted_bytes in (
        ("output", outputs, len(outputs)),
        ("error", await joined((errors, of_missing)), len(errors)),
    ):
        if content:
            ids[kind] = result_file_id(batch.id, kind)
            name = f"{batch.id}_{kind}.jsonl"
            await files.put(owner, ids[kind], name, "batch_output", content, counted_bytes=counted_bytes)
    return ResultFiles(ids.get("output"), ids.get("error"), len(outputs) + len(errors))
