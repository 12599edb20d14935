"""`<｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter></｜DSML｜invoke>`: DeepSeek V3.2.

All calls are inside of `<｜DSML｜function_calls>`; `string` says whether a value is a string or JSON.
"""

from __future__ import annotations

from dynamo.frontend.preprocess.tools.xml_calls import XmlFormat, xml_calls

deepseek_v32 = xml_calls(
    XmlFormat(
        section=("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
        call=("<｜DSML｜invoke name=", "</｜DSML｜invoke>"),
        parameter=("<｜DSML｜parameter name=", "</｜DSML｜parameter>"),
    )
)
