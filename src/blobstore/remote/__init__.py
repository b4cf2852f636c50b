"""Reading checkpoints far away, by HTTP Range: headers and small documents, without downloading a file."""

from blobstore.remote.folders import HUB as HUB
from blobstore.remote.folders import RemoteFolder as RemoteFolder
from blobstore.remote.folders import hub_folder as hub_folder
from blobstore.remote.reader import HttpReader as HttpReader
from blobstore.remote.remote import Remote as Remote
