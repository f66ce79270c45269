"""Prompts of the offline set that are our own: structured output with tool calls, and questions over long text."""

import ast
import importlib
import inspect
import itertools
import re
from collections.abc import Iterator

# Held out from training, see `dflash_hf.trainer.offline_prompts`; two passages of each are used.
_LONG_MODULES = (
    "calendar",
    "csv",
    "difflib",
    "fractions",
    "heapq",
    "ipaddress",
    "shlex",
    "statistics",
    "textwrap",
    "zipfile",
)
_PASSAGES_PER_MODULE = 2
# Words and punctuation marks of a passage: about 600 to 800 tokens.
_PASSAGE_WORDS = (480, 640)
_LONG_TEMPLATE = (
    "This is a part of the source code of Python's `{module}` module:\n\n```python\n{code}\n```\n\n{question}"
)
_LONG_QUESTIONS = (
    "Explain what `{name}` does and which other parts of the code above it relies on.",
    "List the functions and methods defined above, with one sentence about each.",
    "Which errors can this code raise, and what would a caller have to do wrong to see each of them?",
    "Write three unit tests for `{name}`, based only on the code above.",
    "Summarise this code for a colleague who has to maintain it.",
)

JSON_PROMPTS = (
    # Extraction into a given shape.
    'Read the message and fill in this object: {"sender": string, "topic": string, "deadline": string, "tasks": '
    "[string]}.\n\nHi team, this is Ingrid. The spring catalogue goes to print on Friday the 14th, so please check "
    "the captions on pages 3 to 9, replace the blurred photo of the greenhouse, and ask Milan for the new price "
    "list.\n\nAnswer with JSON only.",
    "Turn the opening hours below into a JSON object whose keys are the seven days in English and whose values are "
    "lists of [opens, closes] pairs in 24-hour time. Use an empty list for a day on which the place is closed.\n\n"
    "Tuesday to Friday 10 am to 1 pm and 2.30 pm to 6 pm, Saturday 9 am to noon, closed on Sundays and Mondays.",
    "Below is a server log. Return a JSON array with one object per failed request and the keys `time`, `path`, "
    "`status` and `reason`.\n\n09:14:02 GET /index 200\n09:14:07 GET /orders/81 404 order not found\n09:15:30 POST "
    "/login 200\n09:15:44 POST /upload 413 file too large\n09:16:01 GET /orders/82 200\n09:16:20 GET /report 500 "
    "database timeout",
    "Extract the ingredients of this recipe as JSON with the keys `name`, `amount` and `unit`; use null where the "
    "text gives no amount.\n\nWhisk two eggs with 150 millilitres of buttermilk. Stir in 200 grams of flour, a "
    "teaspoon of baking soda, a pinch of salt and 40 grams of melted butter. Serve with maple syrup.",
    'Classify each review as "positive", "negative" or "mixed" and return a JSON array of objects with `id`, `label` '
    "and `evidence`, where `evidence` quotes a few words of the review.\n\n1. The tent kept us dry in a storm, but "
    "the zip broke on the second day.\n2. Best headlamp I have owned, bright and light.\n3. The stove leaked gas and "
    "support never wrote back.\n4. Nice colour, poor seams.",
    "Convert this table to JSON, one object per row, with numbers as numbers and dates as YYYY-MM-DD.\n\nboat | "
    "length (m) | built | last survey\nSeagull | 7.4 | 1988 | 3 May 2021\nNordlys | 11.9 | 2004 | 17 August 2023\n"
    "Petrel | 9.0 | 1996 | 22 June 2020",
    "Give me a JSON object that describes the family in this text. Each person has `name`, `age` and `children`, and "
    "`children` holds persons of the same form.\n\nOlena is 71. Her son Taras, 45, has two daughters: Sofia, who is "
    "12, and Lina, who is 9. Her other child, Marko, is 39 and has no children.",
    "Answer with a JSON object that has the keys `question`, `options` (four strings), `answer_index` and "
    "`explanation`. Write a quiz question for teenagers about why the sky is blue.",
    # Writing a document of a given form.
    "Write a JSON Schema (draft 2020-12) for a library loan with a borrower's name, an ISBN of 13 digits, the date of "
    "the loan and an optional number of renewals between 0 and 3.",
    "Write a package.json for a small command-line tool called tidepool in version 0.3.1 that depends on commander "
    "and chalk, has a test script that runs vitest, and needs Node 20 or newer.",
    "Create a GeoJSON FeatureCollection with three points: a harbour at 59.91 north, 10.74 east, a lighthouse at "
    "59.75 north, 10.59 east, and a beach at 59.85 north, 10.66 east. Give every point a name and a type.",
    "I need test data for a hotel booking form. Return a JSON array of four bookings with guest, room number, nights, "
    "breakfast (true or false) and total price. One of them must have a guest name with an apostrophe.",
    "Rewrite this YAML file as JSON.\n\nservice: thumbnails\nreplicas: 3\nenvironment:\n  LOG_LEVEL: info\n  "
    'CACHE_SIZE: "256"\nports:\n  - name: http\n    port: 8080\n  - name: metrics\n    port: 9100\n',
    "The following JSON is broken. Repair it and return only the corrected document.\n\n{'title': 'Winter walk', "
    '"distance_km": 8,5, "stops": ["mill", "chapel" "viewpoint"], "open": True,}',
    # Calls of tools.
    'You can call these tools:\n\n[{"name": "get_forecast", "parameters": {"city": "string", "days": "integer"}},\n '
    '{"name": "send_message", "parameters": {"to": "string", "text": "string"}}]\n\nReply with one JSON object of '
    'the form {"tool": ..., "arguments": ...} and nothing else.\n\nUser: Will I need an umbrella in Bergen in the '
    "next three days?",
    "Tools: search_flights(origin, destination, date, max_price), book_seat(flight_id, seat), cancel(booking_id).\n"
    "Answer every request with a JSON array of the calls to make, in order, each with `name` and `arguments`.\n\n"
    "Request: Cancel booking QX-4471 and look for a flight from Porto to Zurich on 2 March for less than 180 euros.",
    "You control a house through one function, set_device(room: string, device: string, state: object). Plan the "
    "calls for this wish and print them as a JSON array: it is film night in the living room, so dim the lamp to 20 "
    "percent, close the blinds, turn the heating to 21 degrees, and switch off the radio in the kitchen.",
    'A function is declared as follows.\n\n```json\n{\n  "name": "create_invoice",\n  "parameters": {\n    '
    '"customer": {"type": "string"},\n    "lines": {"type": "array", "items": {"item": "string", '
    '"quantity": "integer", "unit_price": "number"}},\n    "due_in_days": {"type": "integer"}\n  }\n}\n'
    "```\n\nGive the arguments as JSON for: Bill the Harbour Cafe for 12 bags of coffee at 8.50 each and 3 filters at "
    "4 each, to be paid within two weeks.",
    'The tool `query_orders` takes {"filter": {"field": value}, "sort": "asc" | "desc", "limit": integer} and '
    'returned this:\n\n{"orders": [{"id": 311, "total": 42.0}, {"id": 298, "total": 17.5}, '
    '{"id": 305, "total": 99.9}]}\n\n'
    'The user asks which of the orders was the most expensive. Reply as {"answer": string, "order_id": integer, '
    '"next_call": object or null}.',
    "Write the JSON body of a POST request to /calendar/events for a dentist appointment on 9 October from 8.15 to "
    "8.45 in the morning, with a reminder one day before and another one hour before. Then write the JSON that a "
    "server would send back if that slot were already taken.",
)


def long_context_prompts() -> dict[str, str]:
    """Prompt by id: questions over source code of held-out standard-library modules, two passages of each.

    The text is that of the running Python, so it differs between Python versions.

    Raises:
        OSError: If this Python comes without the source code of its standard library.
    """
    questions = itertools.cycle(_LONG_QUESTIONS)
    prompts = {}
    for module in _LONG_MODULES:
        passages = itertools.islice(_passages(module), _PASSAGES_PER_MODULE)
        for number, ((name, code), question) in enumerate(zip(passages, questions, strict=False)):
            text = _LONG_TEMPLATE.format(module=module, code=code, question=question.format(name=name))
            prompts[f"long-context/{module}.{number}"] = text
    return prompts


def _passages(module: str) -> Iterator[tuple[str, str]]:
    """Name of the longest function and text of each passage: whole functions, methods and class headers in a row."""
    source = inspect.getsource(importlib.import_module(module))
    fewest, most = _PASSAGE_WORDS
    code = ""
    lengths: dict[str, int] = {}
    for name, num_lines, text in _definitions(source):
        if _num_words(code + text) > most:
            code, lengths = "", {}
        if _num_words(text) <= most:
            code += text
            lengths[name] = num_lines
        if _num_words(code) >= fewest:
            yield max(lengths, key=lengths.__getitem__), code.rstrip()
            code, lengths = "", {}


def _definitions(source: str) -> list[tuple[str, int, str]]:
    """Name, number of lines and text of every function, method and class header, up to where the next one begins.

    A class header counts no lines, so that a question asks about a function.
    """
    nodes: list[ast.FunctionDef | ast.ClassDef] = []
    for node in ast.parse(source).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            nodes.append(node)
        if isinstance(node, ast.ClassDef):
            nodes.extend(method for method in node.body if isinstance(method, ast.FunctionDef))
    lines = source.splitlines(keepends=True)
    starts = [min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1 for node in nodes]
    ends = [*starts[1:], len(lines)]
    found = []
    for node, start, end in zip(nodes, starts, ends, strict=True):
        num_lines = 0 if isinstance(node, ast.ClassDef) else (node.end_lineno or 0) - node.lineno + 1
        found.append((node.name, num_lines, "".join(lines[start:end])))
    return found


def _num_words(text: str) -> int:
    return len(re.findall(r"\w+|[^\w\s]", text))
