"""`<seed:tool_call><function=f><parameter=a>1</parameter></function></seed:tool_call>`: Seed OSS."""

from __future__ import annotations

from dynamo.frontend.preprocess.tools.xml_calls import XmlFormat, xml_calls

seed_oss = xml_calls(
    XmlFormat(
        section=("<seed:tool_call>", "</seed:tool_call>"),
        call=("<function=", "</function>"),
        parameter=("<parameter=", "</parameter>"),
    )
)
