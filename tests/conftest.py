"""Before any test module: gRPC is loaded as the library loads it, since some tests fork."""

import tensorhub.wire.grpc_library  # noqa: F401 - for its effect
