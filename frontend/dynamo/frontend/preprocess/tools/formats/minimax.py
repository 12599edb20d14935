"""`<minimax:tool_call><invoke name="f"><parameter name="a">1</parameter></invoke></minimax:tool_call>`: MiniMax M2."""

from __future__ import annotations

from dynamo.frontend.preprocess.tools.xml_calls import XmlFormat, xml_calls

minimax_m2 = xml_calls(
    XmlFormat(
        section=("<minimax:tool_call>", "</minimax:tool_call>"),
        call=("<invoke name=", "</invoke>"),
        parameter=("<parameter name=", "</parameter>"),
    )
)
