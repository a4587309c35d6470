"""The routes of files and batches."""

from __future__ import annotations

from pagoda.api.batches.handlers import (
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
from pagoda.api.route import Route

_OFF = (404,)

ROUTES: dict[str, dict[str, Route]] = {
    "/v1/files": {
        "GET": Route(list_files, "The client's files.", statuses=_OFF),
        "POST": Route(upload_file, "Uploads a file.", statuses=_OFF),
    },
    "/v1/files/*": {
        "GET": Route(get_file, "A file, or with /content its bytes.", statuses=_OFF),
        "DELETE": Route(delete_file, "Deletes a file.", statuses=(409, *_OFF)),
    },
    "/v1/batches": {
        "GET": Route(list_batches, "The client's batches.", statuses=_OFF),
        "POST": Route(create_batch, "Answers the requests of a file.", CreateBatch, statuses=_OFF),
    },
    "/v1/batches/*": {
        "GET": Route(get_batch, "A batch.", statuses=_OFF),
        "POST": Route(cancel_batch, "Cancels a batch (/cancel).", statuses=(409, *_OFF)),
    },
}
