"""Import what the first engine of a process would import, so that ranks which are forked from it need not."""

import transformers.models.auto.modeling_auto  # noqa: F401
