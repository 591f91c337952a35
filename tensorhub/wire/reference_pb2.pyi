from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CallFrame(_message.Message):
    __slots__ = ("id", "hello", "beat", "join", "publish", "seal", "unpublish", "replicate", "serve", "progress", "reroute", "done", "abort", "wait", "list", "status", "watch", "unwatch", "leave", "goodbye")
    ID_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    JOIN_FIELD_NUMBER: _ClassVar[int]
    PUBLISH_FIELD_NUMBER: _ClassVar[int]
    SEAL_FIELD_NUMBER: _ClassVar[int]
    UNPUBLISH_FIELD_NUMBER: _ClassVar[int]
    REPLICATE_FIELD_NUMBER: _ClassVar[int]
    SERVE_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    REROUTE_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    LIST_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    WATCH_FIELD_NUMBER: _ClassVar[int]
    UNWATCH_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    id: int
    hello: Hello
    beat: Beat
    join: Join
    publish: Publish
    seal: Seal
    unpublish: Unpublish
    replicate: Replicate
    serve: Serve
    progress: Progress
    reroute: Reroute
    done: Done
    abort: Abort
    wait: Wait
    list: List
    status: Status
    watch: Watch
    unwatch: Unwatch
    leave: Leave
    goodbye: Goodbye
    def __init__(self, id: _Optional[int] = ..., hello: _Optional[_Union[Hello, _Mapping]] = ..., beat: _Optional[_Union[Beat, _Mapping]] = ..., join: _Optional[_Union[Join, _Mapping]] = ..., publish: _Optional[_Union[Publish, _Mapping]] = ..., seal: _Optional[_Union[Seal, _Mapping]] = ..., unpublish: _Optional[_Union[Unpublish, _Mapping]] = ..., replicate: _Optional[_Union[Replicate, _Mapping]] = ..., serve: _Optional[_Union[Serve, _Mapping]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., reroute: _Optional[_Union[Reroute, _Mapping]] = ..., done: _Optional[_Union[Done, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ..., wait: _Optional[_Union[Wait, _Mapping]] = ..., list: _Optional[_Union[List, _Mapping]] = ..., status: _Optional[_Union[Status, _Mapping]] = ..., watch: _Optional[_Union[Watch, _Mapping]] = ..., unwatch: _Optional[_Union[Unwatch, _Mapping]] = ..., leave: _Optional[_Union[Leave, _Mapping]] = ..., goodbye: _Optional[_Union[Goodbye, _Mapping]] = ...) -> None: ...

class AnswerFrame(_message.Message):
    __slots__ = ("id", "welcome", "ok", "joined", "unpublished", "granted", "held", "committed", "found", "listing", "status_view", "event", "refused", "announced", "moved", "source_lost", "transaction_aborted", "conflicted")
    ID_FIELD_NUMBER: _ClassVar[int]
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    OK_FIELD_NUMBER: _ClassVar[int]
    JOINED_FIELD_NUMBER: _ClassVar[int]
    UNPUBLISHED_FIELD_NUMBER: _ClassVar[int]
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    FOUND_FIELD_NUMBER: _ClassVar[int]
    LISTING_FIELD_NUMBER: _ClassVar[int]
    STATUS_VIEW_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    ANNOUNCED_FIELD_NUMBER: _ClassVar[int]
    MOVED_FIELD_NUMBER: _ClassVar[int]
    SOURCE_LOST_FIELD_NUMBER: _ClassVar[int]
    TRANSACTION_ABORTED_FIELD_NUMBER: _ClassVar[int]
    CONFLICTED_FIELD_NUMBER: _ClassVar[int]
    id: int
    welcome: Welcome
    ok: Ok
    joined: Joined
    unpublished: Unpublished
    granted: Granted
    held: Held
    committed: Committed
    found: Found
    listing: Listing
    status_view: StatusView
    event: Event
    refused: Refused
    announced: Announced
    moved: Moved
    source_lost: SourceLost
    transaction_aborted: TransactionAborted
    conflicted: Conflicted
    def __init__(self, id: _Optional[int] = ..., welcome: _Optional[_Union[Welcome, _Mapping]] = ..., ok: _Optional[_Union[Ok, _Mapping]] = ..., joined: _Optional[_Union[Joined, _Mapping]] = ..., unpublished: _Optional[_Union[Unpublished, _Mapping]] = ..., granted: _Optional[_Union[Granted, _Mapping]] = ..., held: _Optional[_Union[Held, _Mapping]] = ..., committed: _Optional[_Union[Committed, _Mapping]] = ..., found: _Optional[_Union[Found, _Mapping]] = ..., listing: _Optional[_Union[Listing, _Mapping]] = ..., status_view: _Optional[_Union[StatusView, _Mapping]] = ..., event: _Optional[_Union[Event, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., announced: _Optional[_Union[Announced, _Mapping]] = ..., moved: _Optional[_Union[Moved, _Mapping]] = ..., source_lost: _Optional[_Union[SourceLost, _Mapping]] = ..., transaction_aborted: _Optional[_Union[TransactionAborted, _Mapping]] = ..., conflicted: _Optional[_Union[Conflicted, _Mapping]] = ...) -> None: ...

class ModelKey(_message.Message):
    __slots__ = ("job", "name")
    JOB_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    job: str
    name: str
    def __init__(self, job: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class Version(_message.Message):
    __slots__ = ("lineage", "number")
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    lineage: str
    number: int
    def __init__(self, lineage: _Optional[str] = ..., number: _Optional[int] = ...) -> None: ...

class Seat(_message.Message):
    __slots__ = ("model", "replica", "shard")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    model: ModelKey
    replica: str
    shard: int
    def __init__(self, model: _Optional[_Union[ModelKey, _Mapping]] = ..., replica: _Optional[str] = ..., shard: _Optional[int] = ...) -> None: ...

class Location(_message.Message):
    __slots__ = ("parts",)
    PARTS_FIELD_NUMBER: _ClassVar[int]
    parts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, parts: _Optional[_Iterable[str]] = ...) -> None: ...

class Exactly(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class Latest(_message.Message):
    __slots__ = ("back",)
    BACK_FIELD_NUMBER: _ClassVar[int]
    back: int
    def __init__(self, back: _Optional[int] = ...) -> None: ...

class AtLeast(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class Newest(_message.Message):
    __slots__ = ("staleness",)
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    staleness: int
    def __init__(self, staleness: _Optional[int] = ...) -> None: ...

class Where(_message.Message):
    __slots__ = ("model", "version_text", "version_number", "replica", "shard", "shards", "source", "tensor", "bytes_done")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSION_TEXT_FIELD_NUMBER: _ClassVar[int]
    VERSION_NUMBER_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    BYTES_DONE_FIELD_NUMBER: _ClassVar[int]
    model: str
    version_text: str
    version_number: int
    replica: str
    shard: int
    shards: int
    source: str
    tensor: str
    bytes_done: int
    def __init__(self, model: _Optional[str] = ..., version_text: _Optional[str] = ..., version_number: _Optional[int] = ..., replica: _Optional[str] = ..., shard: _Optional[int] = ..., shards: _Optional[int] = ..., source: _Optional[str] = ..., tensor: _Optional[str] = ..., bytes_done: _Optional[int] = ...) -> None: ...

class Locator(_message.Message):
    __slots__ = ("engine", "data")
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    engine: str
    data: bytes
    def __init__(self, engine: _Optional[str] = ..., data: _Optional[bytes] = ...) -> None: ...

class Reference(_message.Message):
    __slots__ = ("seat", "session", "generation", "location", "locators", "exposure")
    SEAT_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    LOCATION_FIELD_NUMBER: _ClassVar[int]
    LOCATORS_FIELD_NUMBER: _ClassVar[int]
    EXPOSURE_FIELD_NUMBER: _ClassVar[int]
    seat: Seat
    session: bytes
    generation: bytes
    location: Location
    locators: _containers.RepeatedCompositeFieldContainer[Locator]
    exposure: bytes
    def __init__(self, seat: _Optional[_Union[Seat, _Mapping]] = ..., session: _Optional[bytes] = ..., generation: _Optional[bytes] = ..., location: _Optional[_Union[Location, _Mapping]] = ..., locators: _Optional[_Iterable[_Union[Locator, _Mapping]]] = ..., exposure: _Optional[bytes] = ...) -> None: ...

class Content(_message.Message):
    __slots__ = ("manifest", "shard_bytes", "chunks", "verified")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    SHARD_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_FIELD_NUMBER: _ClassVar[int]
    manifest: bytes
    shard_bytes: int
    chunks: int
    verified: bool
    def __init__(self, manifest: _Optional[bytes] = ..., shard_bytes: _Optional[int] = ..., chunks: _Optional[int] = ..., verified: _Optional[bool] = ...) -> None: ...

class LineageMark(_message.Message):
    __slots__ = ("name", "order", "first")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    name: str
    order: int
    first: int
    def __init__(self, name: _Optional[str] = ..., order: _Optional[int] = ..., first: _Optional[int] = ...) -> None: ...

class Claim(_message.Message):
    __slots__ = ("buffers", "version", "generation", "content", "root", "published", "watermark", "locators", "exposure", "hidden")
    BUFFERS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_FIELD_NUMBER: _ClassVar[int]
    WATERMARK_FIELD_NUMBER: _ClassVar[int]
    LOCATORS_FIELD_NUMBER: _ClassVar[int]
    EXPOSURE_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_FIELD_NUMBER: _ClassVar[int]
    buffers: str
    version: Version
    generation: bytes
    content: Content
    root: bytes
    published: bool
    watermark: int
    locators: _containers.RepeatedCompositeFieldContainer[Locator]
    exposure: bytes
    hidden: bool
    def __init__(self, buffers: _Optional[str] = ..., version: _Optional[_Union[Version, _Mapping]] = ..., generation: _Optional[bytes] = ..., content: _Optional[_Union[Content, _Mapping]] = ..., root: _Optional[bytes] = ..., published: _Optional[bool] = ..., watermark: _Optional[int] = ..., locators: _Optional[_Iterable[_Union[Locator, _Mapping]]] = ..., exposure: _Optional[bytes] = ..., hidden: _Optional[bool] = ...) -> None: ...

class Undertaking(_message.Message):
    __slots__ = ("buffers", "exactly", "latest", "at_least", "newest", "version", "content", "generation", "timeout_ns", "held", "serves", "upstream", "watermark", "bytes_done", "root", "locators", "exposure", "begun")
    BUFFERS_FIELD_NUMBER: _ClassVar[int]
    EXACTLY_FIELD_NUMBER: _ClassVar[int]
    LATEST_FIELD_NUMBER: _ClassVar[int]
    AT_LEAST_FIELD_NUMBER: _ClassVar[int]
    NEWEST_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_NS_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    SERVES_FIELD_NUMBER: _ClassVar[int]
    UPSTREAM_FIELD_NUMBER: _ClassVar[int]
    WATERMARK_FIELD_NUMBER: _ClassVar[int]
    BYTES_DONE_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    LOCATORS_FIELD_NUMBER: _ClassVar[int]
    EXPOSURE_FIELD_NUMBER: _ClassVar[int]
    BEGUN_FIELD_NUMBER: _ClassVar[int]
    buffers: str
    exactly: Exactly
    latest: Latest
    at_least: AtLeast
    newest: Newest
    version: Version
    content: Content
    generation: bytes
    timeout_ns: int
    held: bool
    serves: bool
    upstream: bytes
    watermark: int
    bytes_done: int
    root: bytes
    locators: _containers.RepeatedCompositeFieldContainer[Locator]
    exposure: bytes
    begun: bool
    def __init__(self, buffers: _Optional[str] = ..., exactly: _Optional[_Union[Exactly, _Mapping]] = ..., latest: _Optional[_Union[Latest, _Mapping]] = ..., at_least: _Optional[_Union[AtLeast, _Mapping]] = ..., newest: _Optional[_Union[Newest, _Mapping]] = ..., version: _Optional[_Union[Version, _Mapping]] = ..., content: _Optional[_Union[Content, _Mapping]] = ..., generation: _Optional[bytes] = ..., timeout_ns: _Optional[int] = ..., held: _Optional[bool] = ..., serves: _Optional[bool] = ..., upstream: _Optional[bytes] = ..., watermark: _Optional[int] = ..., bytes_done: _Optional[int] = ..., root: _Optional[bytes] = ..., locators: _Optional[_Iterable[_Union[Locator, _Mapping]]] = ..., exposure: _Optional[bytes] = ..., begun: _Optional[bool] = ...) -> None: ...

class Standing(_message.Message):
    __slots__ = ("group", "sequence", "committed_sequence", "committed", "published", "seen", "lineages", "undertaking")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_FIELD_NUMBER: _ClassVar[int]
    SEEN_FIELD_NUMBER: _ClassVar[int]
    LINEAGES_FIELD_NUMBER: _ClassVar[int]
    UNDERTAKING_FIELD_NUMBER: _ClassVar[int]
    group: int
    sequence: int
    committed_sequence: int
    committed: Version
    published: Version
    seen: Version
    lineages: _containers.RepeatedCompositeFieldContainer[LineageMark]
    undertaking: Undertaking
    def __init__(self, group: _Optional[int] = ..., sequence: _Optional[int] = ..., committed_sequence: _Optional[int] = ..., committed: _Optional[_Union[Version, _Mapping]] = ..., published: _Optional[_Union[Version, _Mapping]] = ..., seen: _Optional[_Union[Version, _Mapping]] = ..., lineages: _Optional[_Iterable[_Union[LineageMark, _Mapping]]] = ..., undertaking: _Optional[_Union[Undertaking, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol", "session", "token", "host", "pid", "epoch")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    session: bytes
    token: bytes
    host: str
    pid: int
    epoch: bytes
    def __init__(self, protocol: _Optional[int] = ..., session: _Optional[bytes] = ..., token: _Optional[bytes] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., epoch: _Optional[bytes] = ...) -> None: ...

class Beat(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    def __init__(self, session: _Optional[bytes] = ...) -> None: ...

class Join(_message.Message):
    __slots__ = ("seat", "shards", "layout", "spot", "location", "claims", "standing")
    SEAT_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    SPOT_FIELD_NUMBER: _ClassVar[int]
    LOCATION_FIELD_NUMBER: _ClassVar[int]
    CLAIMS_FIELD_NUMBER: _ClassVar[int]
    STANDING_FIELD_NUMBER: _ClassVar[int]
    seat: Seat
    shards: int
    layout: str
    spot: bool
    location: Location
    claims: _containers.RepeatedCompositeFieldContainer[Claim]
    standing: Standing
    def __init__(self, seat: _Optional[_Union[Seat, _Mapping]] = ..., shards: _Optional[int] = ..., layout: _Optional[str] = ..., spot: _Optional[bool] = ..., location: _Optional[_Union[Location, _Mapping]] = ..., claims: _Optional[_Iterable[_Union[Claim, _Mapping]]] = ..., standing: _Optional[_Union[Standing, _Mapping]] = ...) -> None: ...

class Publish(_message.Message):
    __slots__ = ("seat", "buffers", "version", "generation", "content", "locators", "exposure")
    SEAT_FIELD_NUMBER: _ClassVar[int]
    BUFFERS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    LOCATORS_FIELD_NUMBER: _ClassVar[int]
    EXPOSURE_FIELD_NUMBER: _ClassVar[int]
    seat: Seat
    buffers: str
    version: Version
    generation: bytes
    content: Content
    locators: _containers.RepeatedCompositeFieldContainer[Locator]
    exposure: bytes
    def __init__(self, seat: _Optional[_Union[Seat, _Mapping]] = ..., buffers: _Optional[str] = ..., version: _Optional[_Union[Version, _Mapping]] = ..., generation: _Optional[bytes] = ..., content: _Optional[_Union[Content, _Mapping]] = ..., locators: _Optional[_Iterable[_Union[Locator, _Mapping]]] = ..., exposure: _Optional[bytes] = ...) -> None: ...

class Seal(_message.Message):
    __slots__ = ("seat", "generation", "root")
    SEAT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    seat: Seat
    generation: bytes
    root: bytes
    def __init__(self, seat: _Optional[_Union[Seat, _Mapping]] = ..., generation: _Optional[bytes] = ..., root: _Optional[bytes] = ...) -> None: ...

class Unpublish(_message.Message):
    __slots__ = ("seat", "buffers", "timeout_ns", "abandon", "generation")
    SEAT_FIELD_NUMBER: _ClassVar[int]
    BUFFERS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_NS_FIELD_NUMBER: _ClassVar[int]
    ABANDON_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    seat: Seat
    buffers: str
    timeout_ns: int
    abandon: bool
    generation: bytes
    def __init__(self, seat: _Optional[_Union[Seat, _Mapping]] = ..., buffers: _Optional[str] = ..., timeout_ns: _Optional[int] = ..., abandon: _Optional[bool] = ..., generation: _Optional[bytes] = ...) -> None: ...

class Replicate(_message.Message):
    __slots__ = ("seat", "buffers", "group", "sequence", "exactly", "latest", "at_least", "newest", "timeout_ns", "generation", "serves", "manifest", "locators", "exposure")
    SEAT_FIELD_NUMBER: _ClassVar[int]
    BUFFERS_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    EXACTLY_FIELD_NUMBER: _ClassVar[int]
    LATEST_FIELD_NUMBER: _ClassVar[int]
    AT_LEAST_FIELD_NUMBER: _ClassVar[int]
    NEWEST_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_NS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    SERVES_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    LOCATORS_FIELD_NUMBER: _ClassVar[int]
    EXPOSURE_FIELD_NUMBER: _ClassVar[int]
    seat: Seat
    buffers: str
    group: int
    sequence: int
    exactly: Exactly
    latest: Latest
    at_least: AtLeast
    newest: Newest
    timeout_ns: int
    generation: bytes
    serves: bool
    manifest: bytes
    locators: _containers.RepeatedCompositeFieldContainer[Locator]
    exposure: bytes
    def __init__(self, seat: _Optional[_Union[Seat, _Mapping]] = ..., buffers: _Optional[str] = ..., group: _Optional[int] = ..., sequence: _Optional[int] = ..., exactly: _Optional[_Union[Exactly, _Mapping]] = ..., latest: _Optional[_Union[Latest, _Mapping]] = ..., at_least: _Optional[_Union[AtLeast, _Mapping]] = ..., newest: _Optional[_Union[Newest, _Mapping]] = ..., timeout_ns: _Optional[int] = ..., generation: _Optional[bytes] = ..., serves: _Optional[bool] = ..., manifest: _Optional[bytes] = ..., locators: _Optional[_Iterable[_Union[Locator, _Mapping]]] = ..., exposure: _Optional[bytes] = ...) -> None: ...

class Serve(_message.Message):
    __slots__ = ("seat", "generation", "locators", "exposure", "route")
    SEAT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    LOCATORS_FIELD_NUMBER: _ClassVar[int]
    EXPOSURE_FIELD_NUMBER: _ClassVar[int]
    ROUTE_FIELD_NUMBER: _ClassVar[int]
    seat: Seat
    generation: bytes
    locators: _containers.RepeatedCompositeFieldContainer[Locator]
    exposure: bytes
    route: str
    def __init__(self, seat: _Optional[_Union[Seat, _Mapping]] = ..., generation: _Optional[bytes] = ..., locators: _Optional[_Iterable[_Union[Locator, _Mapping]]] = ..., exposure: _Optional[bytes] = ..., route: _Optional[str] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("seat", "generation", "watermark", "bytes_done", "route", "period_ns")
    SEAT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    WATERMARK_FIELD_NUMBER: _ClassVar[int]
    BYTES_DONE_FIELD_NUMBER: _ClassVar[int]
    ROUTE_FIELD_NUMBER: _ClassVar[int]
    PERIOD_NS_FIELD_NUMBER: _ClassVar[int]
    seat: Seat
    generation: bytes
    watermark: int
    bytes_done: int
    route: str
    period_ns: int
    def __init__(self, seat: _Optional[_Union[Seat, _Mapping]] = ..., generation: _Optional[bytes] = ..., watermark: _Optional[int] = ..., bytes_done: _Optional[int] = ..., route: _Optional[str] = ..., period_ns: _Optional[int] = ...) -> None: ...

class Reroute(_message.Message):
    __slots__ = ("seat", "generation", "source", "reason", "watermark", "timeout_ns", "bytes_done")
    SEAT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    WATERMARK_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_NS_FIELD_NUMBER: _ClassVar[int]
    BYTES_DONE_FIELD_NUMBER: _ClassVar[int]
    seat: Seat
    generation: bytes
    source: bytes
    reason: str
    watermark: int
    timeout_ns: int
    bytes_done: int
    def __init__(self, seat: _Optional[_Union[Seat, _Mapping]] = ..., generation: _Optional[bytes] = ..., source: _Optional[bytes] = ..., reason: _Optional[str] = ..., watermark: _Optional[int] = ..., timeout_ns: _Optional[int] = ..., bytes_done: _Optional[int] = ...) -> None: ...

class Done(_message.Message):
    __slots__ = ("seat", "group", "sequence", "generation", "root", "bytes_done")
    SEAT_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    BYTES_DONE_FIELD_NUMBER: _ClassVar[int]
    seat: Seat
    group: int
    sequence: int
    generation: bytes
    root: bytes
    bytes_done: int
    def __init__(self, seat: _Optional[_Union[Seat, _Mapping]] = ..., group: _Optional[int] = ..., sequence: _Optional[int] = ..., generation: _Optional[bytes] = ..., root: _Optional[bytes] = ..., bytes_done: _Optional[int] = ...) -> None: ...

class Abort(_message.Message):
    __slots__ = ("seat", "group", "sequence", "reason")
    SEAT_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    seat: Seat
    group: int
    sequence: int
    reason: str
    def __init__(self, seat: _Optional[_Union[Seat, _Mapping]] = ..., group: _Optional[int] = ..., sequence: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class Wait(_message.Message):
    __slots__ = ("model", "exactly", "latest", "at_least", "newest", "location", "timeout_ns")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    EXACTLY_FIELD_NUMBER: _ClassVar[int]
    LATEST_FIELD_NUMBER: _ClassVar[int]
    AT_LEAST_FIELD_NUMBER: _ClassVar[int]
    NEWEST_FIELD_NUMBER: _ClassVar[int]
    LOCATION_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_NS_FIELD_NUMBER: _ClassVar[int]
    model: ModelKey
    exactly: Exactly
    latest: Latest
    at_least: AtLeast
    newest: Newest
    location: Location
    timeout_ns: int
    def __init__(self, model: _Optional[_Union[ModelKey, _Mapping]] = ..., exactly: _Optional[_Union[Exactly, _Mapping]] = ..., latest: _Optional[_Union[Latest, _Mapping]] = ..., at_least: _Optional[_Union[AtLeast, _Mapping]] = ..., newest: _Optional[_Union[Newest, _Mapping]] = ..., location: _Optional[_Union[Location, _Mapping]] = ..., timeout_ns: _Optional[int] = ...) -> None: ...

class List(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: ModelKey
    def __init__(self, model: _Optional[_Union[ModelKey, _Mapping]] = ...) -> None: ...

class Status(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: ModelKey
    def __init__(self, model: _Optional[_Union[ModelKey, _Mapping]] = ...) -> None: ...

class Watch(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: ModelKey
    def __init__(self, model: _Optional[_Union[ModelKey, _Mapping]] = ...) -> None: ...

class Unwatch(_message.Message):
    __slots__ = ("call",)
    CALL_FIELD_NUMBER: _ClassVar[int]
    call: int
    def __init__(self, call: _Optional[int] = ...) -> None: ...

class Leave(_message.Message):
    __slots__ = ("seat",)
    SEAT_FIELD_NUMBER: _ClassVar[int]
    seat: Seat
    def __init__(self, seat: _Optional[_Union[Seat, _Mapping]] = ...) -> None: ...

class Goodbye(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("epoch", "lease_ns", "beat_ns", "known")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LEASE_NS_FIELD_NUMBER: _ClassVar[int]
    BEAT_NS_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    epoch: bytes
    lease_ns: int
    beat_ns: int
    known: bool
    def __init__(self, epoch: _Optional[bytes] = ..., lease_ns: _Optional[int] = ..., beat_ns: _Optional[int] = ..., known: _Optional[bool] = ...) -> None: ...

class Ok(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Joined(_message.Message):
    __slots__ = ("group", "sequence")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    group: int
    sequence: int
    def __init__(self, group: _Optional[int] = ..., sequence: _Optional[int] = ...) -> None: ...

class Announced(_message.Message):
    __slots__ = ("lineage",)
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    lineage: LineageMark
    def __init__(self, lineage: _Optional[_Union[LineageMark, _Mapping]] = ...) -> None: ...

class Unpublished(_message.Message):
    __slots__ = ("readers", "served")
    READERS_FIELD_NUMBER: _ClassVar[int]
    SERVED_FIELD_NUMBER: _ClassVar[int]
    readers: _containers.RepeatedScalarFieldContainer[str]
    served: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, readers: _Optional[_Iterable[str]] = ..., served: _Optional[_Iterable[str]] = ...) -> None: ...

class Granted(_message.Message):
    __slots__ = ("version", "content", "root", "source", "reason", "drained_ns", "begun", "lineage")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DRAINED_NS_FIELD_NUMBER: _ClassVar[int]
    BEGUN_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    version: Version
    content: Content
    root: bytes
    source: Reference
    reason: str
    drained_ns: int
    begun: bool
    lineage: LineageMark
    def __init__(self, version: _Optional[_Union[Version, _Mapping]] = ..., content: _Optional[_Union[Content, _Mapping]] = ..., root: _Optional[bytes] = ..., source: _Optional[_Union[Reference, _Mapping]] = ..., reason: _Optional[str] = ..., drained_ns: _Optional[int] = ..., begun: _Optional[bool] = ..., lineage: _Optional[_Union[LineageMark, _Mapping]] = ...) -> None: ...

class Held(_message.Message):
    __slots__ = ("version", "lineage")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    version: Version
    lineage: LineageMark
    def __init__(self, version: _Optional[_Union[Version, _Mapping]] = ..., lineage: _Optional[_Union[LineageMark, _Mapping]] = ...) -> None: ...

class Committed(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: Version
    def __init__(self, version: _Optional[_Union[Version, _Mapping]] = ...) -> None: ...

class Found(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: Version
    def __init__(self, version: _Optional[_Union[Version, _Mapping]] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("error", "message", "where")
    ERROR_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    WHERE_FIELD_NUMBER: _ClassVar[int]
    error: str
    message: str
    where: Where
    def __init__(self, error: _Optional[str] = ..., message: _Optional[str] = ..., where: _Optional[_Union[Where, _Mapping]] = ...) -> None: ...

class Moved(_message.Message):
    __slots__ = ("seat", "group", "reason", "sequence")
    SEAT_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    seat: Seat
    group: int
    reason: str
    sequence: int
    def __init__(self, seat: _Optional[_Union[Seat, _Mapping]] = ..., group: _Optional[int] = ..., reason: _Optional[str] = ..., sequence: _Optional[int] = ...) -> None: ...

class SourceLost(_message.Message):
    __slots__ = ("seat", "generation", "source", "reason")
    SEAT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    seat: Seat
    generation: bytes
    source: bytes
    reason: str
    def __init__(self, seat: _Optional[_Union[Seat, _Mapping]] = ..., generation: _Optional[bytes] = ..., source: _Optional[bytes] = ..., reason: _Optional[str] = ...) -> None: ...

class TransactionAborted(_message.Message):
    __slots__ = ("seat", "group", "sequence", "reason")
    SEAT_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    seat: Seat
    group: int
    sequence: int
    reason: str
    def __init__(self, seat: _Optional[_Union[Seat, _Mapping]] = ..., group: _Optional[int] = ..., sequence: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class Conflicted(_message.Message):
    __slots__ = ("seat", "generation", "version", "reason")
    SEAT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    seat: Seat
    generation: bytes
    version: Version
    reason: str
    def __init__(self, seat: _Optional[_Union[Seat, _Mapping]] = ..., generation: _Optional[bytes] = ..., version: _Optional[_Union[Version, _Mapping]] = ..., reason: _Optional[str] = ...) -> None: ...

class VersionView(_message.Message):
    __slots__ = ("model", "version", "state", "shards", "nbytes", "complete", "partial", "readers", "verified")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    PARTIAL_FIELD_NUMBER: _ClassVar[int]
    READERS_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_FIELD_NUMBER: _ClassVar[int]
    model: ModelKey
    version: Version
    state: str
    shards: int
    nbytes: int
    complete: _containers.RepeatedScalarFieldContainer[str]
    partial: _containers.RepeatedScalarFieldContainer[str]
    readers: int
    verified: bool
    def __init__(self, model: _Optional[_Union[ModelKey, _Mapping]] = ..., version: _Optional[_Union[Version, _Mapping]] = ..., state: _Optional[str] = ..., shards: _Optional[int] = ..., nbytes: _Optional[int] = ..., complete: _Optional[_Iterable[str]] = ..., partial: _Optional[_Iterable[str]] = ..., readers: _Optional[int] = ..., verified: _Optional[bool] = ...) -> None: ...

class PulledView(_message.Message):
    __slots__ = ("source", "nbytes", "route", "age_ns", "took_ns")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    ROUTE_FIELD_NUMBER: _ClassVar[int]
    AGE_NS_FIELD_NUMBER: _ClassVar[int]
    TOOK_NS_FIELD_NUMBER: _ClassVar[int]
    source: Seat
    nbytes: int
    route: str
    age_ns: int
    took_ns: int
    def __init__(self, source: _Optional[_Union[Seat, _Mapping]] = ..., nbytes: _Optional[int] = ..., route: _Optional[str] = ..., age_ns: _Optional[int] = ..., took_ns: _Optional[int] = ...) -> None: ...

class HoldingView(_message.Message):
    __slots__ = ("seat", "shards", "buffers", "version", "state", "watermark", "chunks", "nbytes", "upstream", "readers", "spot", "location", "route", "pulled")
    SEAT_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    BUFFERS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    WATERMARK_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    UPSTREAM_FIELD_NUMBER: _ClassVar[int]
    READERS_FIELD_NUMBER: _ClassVar[int]
    SPOT_FIELD_NUMBER: _ClassVar[int]
    LOCATION_FIELD_NUMBER: _ClassVar[int]
    ROUTE_FIELD_NUMBER: _ClassVar[int]
    PULLED_FIELD_NUMBER: _ClassVar[int]
    seat: Seat
    shards: int
    buffers: str
    version: Version
    state: str
    watermark: int
    chunks: int
    nbytes: int
    upstream: str
    readers: _containers.RepeatedScalarFieldContainer[str]
    spot: bool
    location: Location
    route: str
    pulled: _containers.RepeatedCompositeFieldContainer[PulledView]
    def __init__(self, seat: _Optional[_Union[Seat, _Mapping]] = ..., shards: _Optional[int] = ..., buffers: _Optional[str] = ..., version: _Optional[_Union[Version, _Mapping]] = ..., state: _Optional[str] = ..., watermark: _Optional[int] = ..., chunks: _Optional[int] = ..., nbytes: _Optional[int] = ..., upstream: _Optional[str] = ..., readers: _Optional[_Iterable[str]] = ..., spot: _Optional[bool] = ..., location: _Optional[_Union[Location, _Mapping]] = ..., route: _Optional[str] = ..., pulled: _Optional[_Iterable[_Union[PulledView, _Mapping]]] = ...) -> None: ...

class SessionView(_message.Message):
    __slots__ = ("session", "host", "pid", "seats", "lease_left_ns")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    SEATS_FIELD_NUMBER: _ClassVar[int]
    LEASE_LEFT_NS_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    host: str
    pid: int
    seats: _containers.RepeatedCompositeFieldContainer[Seat]
    lease_left_ns: int
    def __init__(self, session: _Optional[bytes] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., seats: _Optional[_Iterable[_Union[Seat, _Mapping]]] = ..., lease_left_ns: _Optional[int] = ...) -> None: ...

class WaitView(_message.Message):
    __slots__ = ("who", "what", "left_ns")
    WHO_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    LEFT_NS_FIELD_NUMBER: _ClassVar[int]
    who: str
    what: str
    left_ns: int
    def __init__(self, who: _Optional[str] = ..., what: _Optional[str] = ..., left_ns: _Optional[int] = ...) -> None: ...

class Listing(_message.Message):
    __slots__ = ("versions",)
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    versions: _containers.RepeatedCompositeFieldContainer[VersionView]
    def __init__(self, versions: _Optional[_Iterable[_Union[VersionView, _Mapping]]] = ...) -> None: ...

class StatusView(_message.Message):
    __slots__ = ("epoch", "sessions", "versions", "holdings", "waiting")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    HOLDINGS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    epoch: bytes
    sessions: _containers.RepeatedCompositeFieldContainer[SessionView]
    versions: _containers.RepeatedCompositeFieldContainer[VersionView]
    holdings: _containers.RepeatedCompositeFieldContainer[HoldingView]
    waiting: _containers.RepeatedCompositeFieldContainer[WaitView]
    def __init__(self, epoch: _Optional[bytes] = ..., sessions: _Optional[_Iterable[_Union[SessionView, _Mapping]]] = ..., versions: _Optional[_Iterable[_Union[VersionView, _Mapping]]] = ..., holdings: _Optional[_Iterable[_Union[HoldingView, _Mapping]]] = ..., waiting: _Optional[_Iterable[_Union[WaitView, _Mapping]]] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("kind", "model", "version", "replica", "shard", "detail")
    KIND_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    kind: str
    model: ModelKey
    version: Version
    replica: str
    shard: int
    detail: str
    def __init__(self, kind: _Optional[str] = ..., model: _Optional[_Union[ModelKey, _Mapping]] = ..., version: _Optional[_Union[Version, _Mapping]] = ..., replica: _Optional[str] = ..., shard: _Optional[int] = ..., detail: _Optional[str] = ...) -> None: ...
