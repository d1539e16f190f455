"""A stand-in for SGLang in tests of the plugin; the real one is used by the tests marked real_server."""
