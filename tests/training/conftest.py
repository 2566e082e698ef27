from __future__ import annotations

import pytest
from training_job import MaskedData, make_masked_data


@pytest.fixture(scope="session")
def bert_data(tmp_path_factory: pytest.TempPathFactory) -> MaskedData:
    return make_masked_data(tmp_path_factory.mktemp("bert"), "BertWordPieceLowerCase")


@pytest.fixture(scope="session")
def t5_data(bert_data: MaskedData) -> MaskedData:
    return MaskedData(bert_data.prefix, "t5")


@pytest.fixture(scope="session")
def roberta_data(tmp_path_factory: pytest.TempPathFactory) -> MaskedData:
    return make_masked_data(tmp_path_factory.mktemp("roberta"), "RobertaBPETokenizer")
