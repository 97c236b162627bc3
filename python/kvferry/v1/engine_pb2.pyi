from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_WORKER: _ClassVar[Role]
    ROLE_SCHEDULER: _ClassVar[Role]

class ShardKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SHARD_KIND_UNSPECIFIED: _ClassVar[ShardKind]
    SHARD_KIND_SHARDED: _ClassVar[ShardKind]
    SHARD_KIND_REPLICATED: _ClassVar[ShardKind]

class RegionKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REGION_KIND_UNSPECIFIED: _ClassVar[RegionKind]
    REGION_KIND_SHARED_HOST: _ClassVar[RegionKind]
    REGION_KIND_STAGING: _ClassVar[RegionKind]

class Retention(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RETENTION_NORMAL: _ClassVar[Retention]
    RETENTION_NONE: _ClassVar[Retention]
    RETENTION_SHORT: _ClassVar[Retention]
    RETENTION_LONG: _ClassVar[Retention]

class BlockStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BLOCK_STATUS_UNSPECIFIED: _ClassVar[BlockStatus]
    BLOCK_STATUS_READY: _ClassVar[BlockStatus]
    BLOCK_STATUS_MISS: _ClassVar[BlockStatus]
    BLOCK_STATUS_BUSY: _ClassVar[BlockStatus]
    BLOCK_STATUS_FAILED: _ClassVar[BlockStatus]
    BLOCK_STATUS_EXPIRED: _ClassVar[BlockStatus]

class BlockSource(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BLOCK_SOURCE_POOL: _ClassVar[BlockSource]
    BLOCK_SOURCE_LENT: _ClassVar[BlockSource]
    BLOCK_SOURCE_DELIVERED: _ClassVar[BlockSource]

class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTCOME_UNSPECIFIED: _ClassVar[Outcome]
    OUTCOME_COMMITTED: _ClassVar[Outcome]
    OUTCOME_REVOKED: _ClassVar[Outcome]
    OUTCOME_FAILED: _ClassVar[Outcome]
    OUTCOME_EXPIRED: _ClassVar[Outcome]
    OUTCOME_BUSY: _ClassVar[Outcome]
    OUTCOME_REJECTED: _ClassVar[Outcome]
ROLE_UNSPECIFIED: Role
ROLE_WORKER: Role
ROLE_SCHEDULER: Role
SHARD_KIND_UNSPECIFIED: ShardKind
SHARD_KIND_SHARDED: ShardKind
SHARD_KIND_REPLICATED: ShardKind
REGION_KIND_UNSPECIFIED: RegionKind
REGION_KIND_SHARED_HOST: RegionKind
REGION_KIND_STAGING: RegionKind
RETENTION_NORMAL: Retention
RETENTION_NONE: Retention
RETENTION_SHORT: Retention
RETENTION_LONG: Retention
BLOCK_STATUS_UNSPECIFIED: BlockStatus
BLOCK_STATUS_READY: BlockStatus
BLOCK_STATUS_MISS: BlockStatus
BLOCK_STATUS_BUSY: BlockStatus
BLOCK_STATUS_FAILED: BlockStatus
BLOCK_STATUS_EXPIRED: BlockStatus
BLOCK_SOURCE_POOL: BlockSource
BLOCK_SOURCE_LENT: BlockSource
BLOCK_SOURCE_DELIVERED: BlockSource
OUTCOME_UNSPECIFIED: Outcome
OUTCOME_COMMITTED: Outcome
OUTCOME_REVOKED: Outcome
OUTCOME_FAILED: Outcome
OUTCOME_EXPIRED: Outcome
OUTCOME_BUSY: Outcome
OUTCOME_REJECTED: Outcome

class SessionRequest(_message.Message):
    __slots__ = ("hello", "use_space", "store", "load", "accept", "release", "revoke", "offer", "release_lease", "complete_offer", "end_offer", "prefetch")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    USE_SPACE_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    ACCEPT_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    REVOKE_FIELD_NUMBER: _ClassVar[int]
    OFFER_FIELD_NUMBER: _ClassVar[int]
    RELEASE_LEASE_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_OFFER_FIELD_NUMBER: _ClassVar[int]
    END_OFFER_FIELD_NUMBER: _ClassVar[int]
    PREFETCH_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    use_space: UseSpace
    store: Store
    load: Load
    accept: Accept
    release: Release
    revoke: Revoke
    offer: Offer
    release_lease: ReleaseLease
    complete_offer: CompleteOffer
    end_offer: EndOffer
    prefetch: Prefetch
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., use_space: _Optional[_Union[UseSpace, _Mapping]] = ..., store: _Optional[_Union[Store, _Mapping]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., accept: _Optional[_Union[Accept, _Mapping]] = ..., release: _Optional[_Union[Release, _Mapping]] = ..., revoke: _Optional[_Union[Revoke, _Mapping]] = ..., offer: _Optional[_Union[Offer, _Mapping]] = ..., release_lease: _Optional[_Union[ReleaseLease, _Mapping]] = ..., complete_offer: _Optional[_Union[CompleteOffer, _Mapping]] = ..., end_offer: _Optional[_Union[EndOffer, _Mapping]] = ..., prefetch: _Optional[_Union[Prefetch, _Mapping]] = ...) -> None: ...

class SessionResponse(_message.Message):
    __slots__ = ("welcome", "attached", "space_ready", "operation_end", "load_result", "refused", "draining", "offer_served", "lent_gone")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    SPACE_READY_FIELD_NUMBER: _ClassVar[int]
    OPERATION_END_FIELD_NUMBER: _ClassVar[int]
    LOAD_RESULT_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    OFFER_SERVED_FIELD_NUMBER: _ClassVar[int]
    LENT_GONE_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    attached: Attached
    space_ready: SpaceReady
    operation_end: OperationEnd
    load_result: LoadResult
    refused: Refused
    draining: Draining
    offer_served: OfferServed
    lent_gone: LentGone
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., attached: _Optional[_Union[Attached, _Mapping]] = ..., space_ready: _Optional[_Union[SpaceReady, _Mapping]] = ..., operation_end: _Optional[_Union[OperationEnd, _Mapping]] = ..., load_result: _Optional[_Union[LoadResult, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., draining: _Optional[_Union[Draining, _Mapping]] = ..., offer_served: _Optional[_Union[OfferServed, _Mapping]] = ..., lent_gone: _Optional[_Union[LentGone, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("wire_version", "role", "instance", "rank", "ranks", "space", "regions", "engine", "engine_version", "serving_address", "tenant", "generations", "engine_start", "reads_lent")
    WIRE_VERSION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    SPACE_FIELD_NUMBER: _ClassVar[int]
    REGIONS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_VERSION_FIELD_NUMBER: _ClassVar[int]
    SERVING_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_START_FIELD_NUMBER: _ClassVar[int]
    READS_LENT_FIELD_NUMBER: _ClassVar[int]
    wire_version: int
    role: Role
    instance: str
    rank: int
    ranks: int
    space: Space
    regions: _containers.RepeatedCompositeFieldContainer[Region]
    engine: str
    engine_version: str
    serving_address: str
    tenant: str
    generations: int
    engine_start: str
    reads_lent: bool
    def __init__(self, wire_version: _Optional[int] = ..., role: _Optional[_Union[Role, str]] = ..., instance: _Optional[str] = ..., rank: _Optional[int] = ..., ranks: _Optional[int] = ..., space: _Optional[_Union[Space, _Mapping]] = ..., regions: _Optional[_Iterable[_Union[Region, _Mapping]]] = ..., engine: _Optional[str] = ..., engine_version: _Optional[str] = ..., serving_address: _Optional[str] = ..., tenant: _Optional[str] = ..., generations: _Optional[int] = ..., engine_start: _Optional[str] = ..., reads_lent: bool = ...) -> None: ...

class Space(_message.Message):
    __slots__ = ("model", "revision", "weights_generation", "kv_dtype", "block_tokens", "group", "attention", "layers", "heads", "head_size", "layout", "tp", "pp", "dcp", "shard_kind", "hash_algorithm", "hash_seed")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_GENERATION_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_SIZE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    TP_FIELD_NUMBER: _ClassVar[int]
    PP_FIELD_NUMBER: _ClassVar[int]
    DCP_FIELD_NUMBER: _ClassVar[int]
    SHARD_KIND_FIELD_NUMBER: _ClassVar[int]
    HASH_ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    HASH_SEED_FIELD_NUMBER: _ClassVar[int]
    model: str
    revision: str
    weights_generation: str
    kv_dtype: str
    block_tokens: int
    group: int
    attention: str
    layers: int
    heads: int
    head_size: int
    layout: str
    tp: int
    pp: int
    dcp: int
    shard_kind: ShardKind
    hash_algorithm: str
    hash_seed: str
    def __init__(self, model: _Optional[str] = ..., revision: _Optional[str] = ..., weights_generation: _Optional[str] = ..., kv_dtype: _Optional[str] = ..., block_tokens: _Optional[int] = ..., group: _Optional[int] = ..., attention: _Optional[str] = ..., layers: _Optional[int] = ..., heads: _Optional[int] = ..., head_size: _Optional[int] = ..., layout: _Optional[str] = ..., tp: _Optional[int] = ..., pp: _Optional[int] = ..., dcp: _Optional[int] = ..., shard_kind: _Optional[_Union[ShardKind, str]] = ..., hash_algorithm: _Optional[str] = ..., hash_seed: _Optional[str] = ...) -> None: ...

class Region(_message.Message):
    __slots__ = ("id", "kind", "bytes", "blocks", "planes", "writable")
    ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PLANES_FIELD_NUMBER: _ClassVar[int]
    WRITABLE_FIELD_NUMBER: _ClassVar[int]
    id: int
    kind: RegionKind
    bytes: int
    blocks: int
    planes: _containers.RepeatedCompositeFieldContainer[Plane]
    writable: bool
    def __init__(self, id: _Optional[int] = ..., kind: _Optional[_Union[RegionKind, str]] = ..., bytes: _Optional[int] = ..., blocks: _Optional[int] = ..., planes: _Optional[_Iterable[_Union[Plane, _Mapping]]] = ..., writable: bool = ...) -> None: ...

class Plane(_message.Message):
    __slots__ = ("base", "stride", "bytes", "head_first", "head_count")
    BASE_FIELD_NUMBER: _ClassVar[int]
    STRIDE_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIRST_FIELD_NUMBER: _ClassVar[int]
    HEAD_COUNT_FIELD_NUMBER: _ClassVar[int]
    base: int
    stride: int
    bytes: int
    head_first: int
    head_count: int
    def __init__(self, base: _Optional[int] = ..., stride: _Optional[int] = ..., bytes: _Optional[int] = ..., head_first: _Optional[int] = ..., head_count: _Optional[int] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("epoch", "session_id", "token", "space_id", "pool_bytes", "words", "store_blocks_max", "load_blocks_max", "match_blocks_max", "wire_version", "peer_address", "version", "direct")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    SPACE_ID_FIELD_NUMBER: _ClassVar[int]
    POOL_BYTES_FIELD_NUMBER: _ClassVar[int]
    WORDS_FIELD_NUMBER: _ClassVar[int]
    STORE_BLOCKS_MAX_FIELD_NUMBER: _ClassVar[int]
    LOAD_BLOCKS_MAX_FIELD_NUMBER: _ClassVar[int]
    MATCH_BLOCKS_MAX_FIELD_NUMBER: _ClassVar[int]
    WIRE_VERSION_FIELD_NUMBER: _ClassVar[int]
    PEER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DIRECT_FIELD_NUMBER: _ClassVar[int]
    epoch: bytes
    session_id: int
    token: bytes
    space_id: bytes
    pool_bytes: int
    words: int
    store_blocks_max: int
    load_blocks_max: int
    match_blocks_max: int
    wire_version: int
    peer_address: str
    version: str
    direct: bool
    def __init__(self, epoch: _Optional[bytes] = ..., session_id: _Optional[int] = ..., token: _Optional[bytes] = ..., space_id: _Optional[bytes] = ..., pool_bytes: _Optional[int] = ..., words: _Optional[int] = ..., store_blocks_max: _Optional[int] = ..., load_blocks_max: _Optional[int] = ..., match_blocks_max: _Optional[int] = ..., wire_version: _Optional[int] = ..., peer_address: _Optional[str] = ..., version: _Optional[str] = ..., direct: bool = ...) -> None: ...

class Attached(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class UseSpace(_message.Message):
    __slots__ = ("sequence", "space")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SPACE_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    space: Space
    def __init__(self, sequence: _Optional[int] = ..., space: _Optional[_Union[Space, _Mapping]] = ...) -> None: ...

class SpaceReady(_message.Message):
    __slots__ = ("sequence", "space_id")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SPACE_ID_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    space_id: bytes
    def __init__(self, sequence: _Optional[int] = ..., space_id: _Optional[bytes] = ...) -> None: ...

class Store(_message.Message):
    __slots__ = ("operation", "word", "space_id", "request_id", "region", "block_ids", "hashes", "parents", "deadline_ms", "retention")
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    WORD_FIELD_NUMBER: _ClassVar[int]
    SPACE_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    RETENTION_FIELD_NUMBER: _ClassVar[int]
    operation: int
    word: int
    space_id: bytes
    request_id: str
    region: int
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    hashes: bytes
    parents: bytes
    deadline_ms: int
    retention: Retention
    def __init__(self, operation: _Optional[int] = ..., word: _Optional[int] = ..., space_id: _Optional[bytes] = ..., request_id: _Optional[str] = ..., region: _Optional[int] = ..., block_ids: _Optional[_Iterable[int]] = ..., hashes: _Optional[bytes] = ..., parents: _Optional[bytes] = ..., deadline_ms: _Optional[int] = ..., retention: _Optional[_Union[Retention, str]] = ...) -> None: ...

class Prefetch(_message.Message):
    __slots__ = ("space_id", "hashes")
    SPACE_ID_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    space_id: bytes
    hashes: bytes
    def __init__(self, space_id: _Optional[bytes] = ..., hashes: _Optional[bytes] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("operation", "word", "space_id", "request_id", "hashes", "deadline_ms")
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    WORD_FIELD_NUMBER: _ClassVar[int]
    SPACE_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    operation: int
    word: int
    space_id: bytes
    request_id: str
    hashes: bytes
    deadline_ms: int
    def __init__(self, operation: _Optional[int] = ..., word: _Optional[int] = ..., space_id: _Optional[bytes] = ..., request_id: _Optional[str] = ..., hashes: _Optional[bytes] = ..., deadline_ms: _Optional[int] = ...) -> None: ...

class Accept(_message.Message):
    __slots__ = ("load", "ticket", "region", "block_ids")
    LOAD_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    load: Load
    ticket: bytes
    region: int
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, load: _Optional[_Union[Load, _Mapping]] = ..., ticket: _Optional[bytes] = ..., region: _Optional[int] = ..., block_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class LoadResult(_message.Message):
    __slots__ = ("operation", "first", "status", "offsets", "header_offsets", "generations", "crc32c", "shard_bytes", "last", "source", "lent")
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    HEADER_OFFSETS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    SHARD_BYTES_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    LENT_FIELD_NUMBER: _ClassVar[int]
    operation: int
    first: int
    status: bytes
    offsets: _containers.RepeatedScalarFieldContainer[int]
    header_offsets: _containers.RepeatedScalarFieldContainer[int]
    generations: _containers.RepeatedScalarFieldContainer[int]
    crc32c: _containers.RepeatedScalarFieldContainer[int]
    shard_bytes: int
    last: bool
    source: bytes
    lent: Lent
    def __init__(self, operation: _Optional[int] = ..., first: _Optional[int] = ..., status: _Optional[bytes] = ..., offsets: _Optional[_Iterable[int]] = ..., header_offsets: _Optional[_Iterable[int]] = ..., generations: _Optional[_Iterable[int]] = ..., crc32c: _Optional[_Iterable[int]] = ..., shard_bytes: _Optional[int] = ..., last: bool = ..., source: _Optional[bytes] = ..., lent: _Optional[_Union[Lent, _Mapping]] = ...) -> None: ...

class Lent(_message.Message):
    __slots__ = ("handle", "token", "bytes", "blocks", "planes", "generations")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PLANES_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    handle: int
    token: bytes
    bytes: int
    blocks: int
    planes: _containers.RepeatedCompositeFieldContainer[Plane]
    generations: int
    def __init__(self, handle: _Optional[int] = ..., token: _Optional[bytes] = ..., bytes: _Optional[int] = ..., blocks: _Optional[int] = ..., planes: _Optional[_Iterable[_Union[Plane, _Mapping]]] = ..., generations: _Optional[int] = ...) -> None: ...

class LentGone(_message.Message):
    __slots__ = ("handle",)
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    handle: int
    def __init__(self, handle: _Optional[int] = ...) -> None: ...

class Release(_message.Message):
    __slots__ = ("operations", "wrong_blocks")
    OPERATIONS_FIELD_NUMBER: _ClassVar[int]
    WRONG_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    operations: _containers.RepeatedScalarFieldContainer[int]
    wrong_blocks: int
    def __init__(self, operations: _Optional[_Iterable[int]] = ..., wrong_blocks: _Optional[int] = ...) -> None: ...

class Revoke(_message.Message):
    __slots__ = ("operations",)
    OPERATIONS_FIELD_NUMBER: _ClassVar[int]
    operations: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, operations: _Optional[_Iterable[int]] = ...) -> None: ...

class OperationEnd(_message.Message):
    __slots__ = ("operation", "outcome", "reason", "blocks_stored", "blocks_present")
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_STORED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_PRESENT_FIELD_NUMBER: _ClassVar[int]
    operation: int
    outcome: Outcome
    reason: str
    blocks_stored: int
    blocks_present: int
    def __init__(self, operation: _Optional[int] = ..., outcome: _Optional[_Union[Outcome, str]] = ..., reason: _Optional[str] = ..., blocks_stored: _Optional[int] = ..., blocks_present: _Optional[int] = ...) -> None: ...

class Offer(_message.Message):
    __slots__ = ("offer_id", "secret", "space_id", "request_id", "hashes", "tokens", "lifetime_ms", "open_ended", "region", "block_ids", "generations")
    OFFER_ID_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    SPACE_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LIFETIME_MS_FIELD_NUMBER: _ClassVar[int]
    OPEN_ENDED_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    offer_id: bytes
    secret: bytes
    space_id: bytes
    request_id: str
    hashes: bytes
    tokens: int
    lifetime_ms: int
    open_ended: bool
    region: int
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    generations: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, offer_id: _Optional[bytes] = ..., secret: _Optional[bytes] = ..., space_id: _Optional[bytes] = ..., request_id: _Optional[str] = ..., hashes: _Optional[bytes] = ..., tokens: _Optional[int] = ..., lifetime_ms: _Optional[int] = ..., open_ended: bool = ..., region: _Optional[int] = ..., block_ids: _Optional[_Iterable[int]] = ..., generations: _Optional[_Iterable[int]] = ...) -> None: ...

class CompleteOffer(_message.Message):
    __slots__ = ("offer_id", "region", "block_ids", "generations")
    OFFER_ID_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    offer_id: bytes
    region: int
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    generations: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, offer_id: _Optional[bytes] = ..., region: _Optional[int] = ..., block_ids: _Optional[_Iterable[int]] = ..., generations: _Optional[_Iterable[int]] = ...) -> None: ...

class EndOffer(_message.Message):
    __slots__ = ("offer_id", "reason")
    OFFER_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    offer_id: bytes
    reason: str
    def __init__(self, offer_id: _Optional[bytes] = ..., reason: _Optional[str] = ...) -> None: ...

class OfferServed(_message.Message):
    __slots__ = ("offer_id", "reason")
    OFFER_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    offer_id: bytes
    reason: str
    def __init__(self, offer_id: _Optional[bytes] = ..., reason: _Optional[str] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("field", "reason", "code")
    FIELD_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    field: str
    reason: str
    code: int
    def __init__(self, field: _Optional[str] = ..., reason: _Optional[str] = ..., code: _Optional[int] = ...) -> None: ...

class ReleaseLease(_message.Message):
    __slots__ = ("request_ids",)
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, request_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class Draining(_message.Message):
    __slots__ = ("deadline_ms",)
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    deadline_ms: int
    def __init__(self, deadline_ms: _Optional[int] = ...) -> None: ...

class MatchRequest(_message.Message):
    __slots__ = ("session_id", "request_id", "space_id", "hashes", "lease_ms", "peers", "compute_us")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SPACE_ID_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_US_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    request_id: str
    space_id: bytes
    hashes: bytes
    lease_ms: int
    peers: _containers.RepeatedScalarFieldContainer[str]
    compute_us: int
    def __init__(self, session_id: _Optional[int] = ..., request_id: _Optional[str] = ..., space_id: _Optional[bytes] = ..., hashes: _Optional[bytes] = ..., lease_ms: _Optional[int] = ..., peers: _Optional[_Iterable[str]] = ..., compute_us: _Optional[int] = ...) -> None: ...

class MatchResponse(_message.Message):
    __slots__ = ("blocks", "dram_blocks", "nvme_blocks", "restore_us", "lease_ms", "peer_blocks", "peer_us", "peer_reason")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DRAM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NVME_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RESTORE_US_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    PEER_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PEER_US_FIELD_NUMBER: _ClassVar[int]
    PEER_REASON_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    dram_blocks: int
    nvme_blocks: int
    restore_us: int
    lease_ms: int
    peer_blocks: int
    peer_us: int
    peer_reason: str
    def __init__(self, blocks: _Optional[int] = ..., dram_blocks: _Optional[int] = ..., nvme_blocks: _Optional[int] = ..., restore_us: _Optional[int] = ..., lease_ms: _Optional[int] = ..., peer_blocks: _Optional[int] = ..., peer_us: _Optional[int] = ..., peer_reason: _Optional[str] = ...) -> None: ...

class Ticket(_message.Message):
    __slots__ = ("wire_version", "addresses", "offer_id", "secret", "epoch", "space_id", "tail_hash", "blocks", "tokens", "lifetime_ms", "traceparent", "instance")
    WIRE_VERSION_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    OFFER_ID_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SPACE_ID_FIELD_NUMBER: _ClassVar[int]
    TAIL_HASH_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LIFETIME_MS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    wire_version: int
    addresses: _containers.RepeatedScalarFieldContainer[str]
    offer_id: bytes
    secret: bytes
    epoch: bytes
    space_id: bytes
    tail_hash: bytes
    blocks: int
    tokens: int
    lifetime_ms: int
    traceparent: str
    instance: str
    def __init__(self, wire_version: _Optional[int] = ..., addresses: _Optional[_Iterable[str]] = ..., offer_id: _Optional[bytes] = ..., secret: _Optional[bytes] = ..., epoch: _Optional[bytes] = ..., space_id: _Optional[bytes] = ..., tail_hash: _Optional[bytes] = ..., blocks: _Optional[int] = ..., tokens: _Optional[int] = ..., lifetime_ms: _Optional[int] = ..., traceparent: _Optional[str] = ..., instance: _Optional[str] = ...) -> None: ...
