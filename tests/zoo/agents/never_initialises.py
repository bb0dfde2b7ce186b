"""Reads everything and says nothing."""

from tests.zoo.wire import until_the_client_leaves

until_the_client_leaves()
