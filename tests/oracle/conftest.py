"""Fixtures of the tests against Ollama's records."""

import pytest
from oracle.ollama_cases import Case, Cases, case_maker


@pytest.fixture(scope="session")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Cases:
    """A function that imports a source as a type, once a session."""
    return case_maker(tmp_path_factory.mktemp("ollama-records"))


@pytest.fixture
def case(cases: Cases, source: str, quant: str) -> Case:
    return cases(source, quant)
