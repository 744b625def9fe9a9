"""POST /tokenize and /detokenize.

Answers from the tokenizer alone: no place is taken; the broker is asked only whether the model was swapped. Invariant: /tokenize gives the ids that
a chat or completion of the same text would have.
"""

import falcon.asgi

from api.fields import refuse
from api.generate import Generation, check_ids
from api.normalize_completion import NormalizedTokenization, normalize_detokenization, normalize_tokenization
from api.prompt import TooLong
from api.resources.replies import list_ignored, read_body
from api.responses import RequestError
from api.served import ServedModel
from api.settings import ApiSettings
from api.template import TemplateComplaint

# Counting is useful beyond what a model takes, but each token takes half a kilobyte while it is counted.
MOST_CONTEXTS = 4


class Tokenize:
    """Text or messages to ids."""

    def __init__(self, generation: Generation, settings: ApiSettings) -> None:
        self._generation = generation
        self._strict = settings.strict_fields

    async def on_post(self, req: falcon.asgi.Request, resp: falcon.asgi.Response) -> None:
        asked = await read_body(req, self._generation, lambda body: normalize_tokenization(body, self._strict))
        await self._generation.catalog.refresh()
        model = self._generation.model_or_only(asked.model)
        limit = MOST_CONTEXTS * model.context
        try:
            ids = await self._generation.in_thread(_ids, model, asked, limit)
        except TooLong as error:
            raise RequestError(400, f"{error}.", code="context_length_exceeded", param="prompt") from None
        except TemplateComplaint as error:
            raise refuse("messages", str(error)) from None
        list_ignored(resp, asked.ignored)
        resp.media = {"tokens": ids, "count": len(ids), "max_model_len": model.context}


def _ids(model: ServedModel, asked: NormalizedTokenization, limit: int) -> list[int]:
    if asked.prompt is not None:
        return model.prompts.text(asked.prompt, limit)
    return model.prompts.chat(asked.messages, asked.template_kwargs, asked.tools.offered, limit).ids


class Detokenize:
    """Ids to text."""

    def __init__(self, generation: Generation, settings: ApiSettings) -> None:
        self._generation = generation
        self._strict = settings.strict_fields

    async def on_post(self, req: falcon.asgi.Request, resp: falcon.asgi.Response) -> None:
        asked = await read_body(req, self._generation, lambda body: normalize_detokenization(body, self._strict))
        ids = asked.tokens
        await self._generation.catalog.refresh()
        model = self._generation.model_or_only(asked.model)
        if len(ids) > MOST_CONTEXTS * model.context:
            message = f"tokens: {len(ids)} ids are more than {MOST_CONTEXTS} contexts of {model.context}."
            raise RequestError(400, message, code="context_length_exceeded", param="tokens")
        check_ids([ids], model, "tokens")
        list_ignored(resp, asked.ignored)
        resp.media = {"prompt": await self._generation.in_thread(model.prompts.tokens.decode, ids)}
