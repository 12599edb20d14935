"""`<tool_call><function=f><parameter=a>1</parameter></function></tool_call>`: Qwen 3 Coder, Nemotron 3.

Each tag and each value is in a line of its own.
"""

from __future__ import annotations

from dynamo.frontend.preprocess.tools.xml_calls import XmlFormat, xml_calls

qwen3_coder = xml_calls(
    XmlFormat(
        section=("<tool_call>", "</tool_call>"),
        call=("<function=", "</function>"),
        parameter=("<parameter=", "</parameter>"),
        has_newlines=True,
    )
)
