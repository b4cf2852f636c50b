/** The page at an address without a page. */

import "./page.js";
