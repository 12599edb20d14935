"""`<tool_call>f⏎<arg_key>a</arg_key>⏎<arg_value>1</arg_value>⏎</tool_call>`: GLM 4.5 and later, some without the newlines."""

from __future__ import annotations

from dynamo.frontend.preprocess.tools.xml_calls import XmlFormat, xml_calls

glm45 = xml_calls(
    XmlFormat(
        section=("<tool_call>", "</tool_call>"),
        call=("<tool_call>", "</tool_call>"),
        parameter=("<arg_key>", "</arg_value>"),
        name_ends=("\n", "<arg_key>", "</tool_call>"),
        parameter_name_ends=("</arg_key>\n<arg_value>", "</arg_key><arg_value>"),
    )
)
