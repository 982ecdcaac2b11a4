//! How a browser should treat a download: its name and its media type.

use std::path::Path;

use percent_encoding::{utf8_percent_encode, AsciiSet, NON_ALPHANUMERIC};

/// What RFC 8187 lets stand unescaped.
const ATTRIBUTE: &AsciiSet = &NON_ALPHANUMERIC.remove(b'.').remove(b'-').remove(b'_').remove(b'~');

/// `Content-Disposition: inline` with the file's name; names that a quoted string cannot carry also in the extended form.
pub fn inline(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let plain = |c: char| (' '..='~').contains(&c) && !matches!(c, '"' | '\\');
    let quoted: String = name.chars().map(|c| if plain(c) { c } else { '_' }).collect();
    let mut value = format!("inline; filename=\"{quoted}\"");
    if quoted != name {
        value.push_str(&format!("; filename*=UTF-8''{}", utf8_percent_encode(&name, ATTRIBUTE)));
    }
    value
}

/// The media type a browser needs to show the file, by its extension; the SDKs do not look at it.
pub fn content_type(path: &Path) -> &'static str {
    let extension = path.extension().map(|extension| extension.to_string_lossy().to_ascii_lowercase());
    match extension.as_deref().unwrap_or("") {
        "txt" | "log" | "md" | "py" | "rs" | "sh" | "toml" | "yaml" | "yml" => "text/plain; charset=utf-8",
        "csv" => "text/csv; charset=utf-8",
        "htm" | "html" => "text/html; charset=utf-8",
        "css" => "text/css; charset=utf-8",
        "js" | "mjs" => "text/javascript; charset=utf-8",
        "json" => "application/json",
        "xml" => "text/xml; charset=utf-8",
        "pdf" => "application/pdf",
        "svg" => "image/svg+xml",
        "png" => "image/png",
        "jpg" | "jpeg" => "image/jpeg",
        "gif" => "image/gif",
        "webp" => "image/webp",
        "mp4" => "video/mp4",
        "wasm" => "application/wasm",
        _ => "application/octet-stream",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_quoted_or_escaped() {
        assert_eq!(inline(Path::new("/a/b c.txt")), r#"inline; filename="b c.txt""#);
        assert_eq!(inline(Path::new("/a/ü\"\r\n")), r#"inline; filename="____"; filename*=UTF-8''%C3%BC%22%0D%0A"#);
    }

    #[test]
    fn types_by_extension() {
        assert_eq!(content_type(Path::new("/a/X.PNG")), "image/png");
        assert_eq!(content_type(Path::new("/a/png")), "application/octet-stream");
    }
}
