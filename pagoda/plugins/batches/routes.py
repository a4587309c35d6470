# SPDX-License-Identifier: Apache-2.0
"""The routes of files and batches."""

from __future__ import annotations

from pagoda.api.route import ANSWER, Route
from pagoda.plugins.batches.handlers import (
    CreateBatch,
    cancel_batch,
    create_batch,
    delete_file,
    get_batch,
    get_file,
    list_batches,
    list_files,
    upload_file,
)

_OFF = (404,)

ROUTES: dict[str, dict[str, Route]] = {
    "/v1/files": {
        "GET": Route(list_files, "The client's files.", ANSWER, statuses=_OFF),
        "POST": Route(
            upload_file, "Uploads a file.", ANSWER, takes_form=True, statuses=(429, *_OFF)
        ),
    },
    "/v1/files/*": {
        "GET": Route(get_file, "A file, or with /content its bytes.", ANSWER, statuses=_OFF),
        "DELETE": Route(delete_file, "Deletes a file.", ANSWER, statuses=(409, *_OFF)),
    },
    "/v1/batches": {
        "GET": Route(list_batches, "The client's batches.", ANSWER, statuses=_OFF),
        "POST": Route(
            create_batch, "Answers the requests of a file.", ANSWER, CreateBatch, statuses=_OFF
        ),
    },
    "/v1/batches/*": {
        "GET": Route(get_batch, "A batch.", ANSWER, statuses=_OFF),
        "POST": Route(cancel_batch, "Cancels a batch (/cancel).", ANSWER, statuses=(409, *_OFF)),
    },
}
